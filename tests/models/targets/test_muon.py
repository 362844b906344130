"""Muon in float32 against torch's, which rounds to bfloat16."""

import pytest
import torch

from models.targets.muon import Muon, orthogonalised


@pytest.mark.parametrize("shape", [(24, 24), (16, 48), (48, 16)])
def test_the_update_has_the_gradients_singular_vectors_and_singular_values_near_one(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    left, values, right = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    inside = left.T @ orthogonalised(left @ values.diag() @ right) @ right.T
    assert torch.allclose(inside, inside.diagonal().diag(), atol=1e-4)
    assert inside.diagonal().min() > 0.5
    assert inside.diagonal().max() < 1.3


def test_steps_are_those_of_torch_but_for_its_rounding() -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(32, 80), torch.randn(5, 32, 80)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    optimizers = [Muon([ours], 0.02), torch.optim.Muon([theirs], lr=0.02, adjust_lr_fn="match_rms_adamw")]
    for gradient in gradients:
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    moved = (ours - start).norm()
    assert (ours - theirs).norm() < 0.02 * moved
