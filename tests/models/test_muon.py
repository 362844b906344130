"""Muon against torch's, which rounds to bfloat16, and the optimizer of drafts that contains it."""

from functools import partial

import pytest
import torch

from models.muon import MuonAndAdamW, orthogonalised

LOOSE = 0.3
"""Singular values lie between 0.7 and 1.2; a little more in bfloat16."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(24, 24), (16, 48), (48, 16)])
def test_the_update_has_the_gradients_singular_vectors_and_singular_values_near_one(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    left, values, right = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    found = orthogonalised(left @ values.diag() @ right, dtype)
    assert found.dtype == torch.float32
    inside = left.T @ found @ right.T
    assert torch.allclose(inside, inside.diagonal().diag(), atol=1e-4 if dtype == torch.float32 else 0.1)
    assert inside.diagonal().min() > 0.5
    assert inside.diagonal().max() < 1 + LOOSE


def test_steps_are_those_of_torch_but_for_its_rounding() -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(32, 80), torch.randn(5, 32, 80)
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    optimizers = [both([ours], 0.1), torch.optim.Muon([theirs], lr=0.02, adjust_lr_fn="match_rms_adamw")]
    for gradient in gradients:
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    moved = (ours - start).norm()
    assert (ours - theirs).norm() < 0.02 * moved


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((32, 80), (16, 16), (50, 16), (16,))
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def both(weights: list[torch.nn.Parameter], weight_decay: float) -> MuonAndAdamW:
    return MuonAndAdamW(weights[:2], weights[2:], 0.02, (0.9, 0.95), weight_decay, orthogonalised)


def take_steps(optimizer: torch.optim.Optimizer, weights: list[torch.nn.Parameter], steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step + 1)
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()


def test_matrices_step_by_muon_and_all_else_as_by_adamw() -> None:
    ours, theirs = parameters(), parameters()
    adamw = torch.optim.AdamW(theirs[2:], 0.02, (0.9, 0.95), weight_decay=0.1, fused=True)
    take_steps(both(ours, 0.1), ours, range(5))
    take_steps(adamw, theirs, range(5))
    for mine, other in zip(ours[2:], theirs[2:], strict=True):
        assert torch.equal(mine, other)
    matrices = parameters()
    take_steps(both(matrices[:2], 0.1), matrices, range(5))
    for mine, other in zip(ours[:2], matrices[:2], strict=True):
        assert torch.equal(mine, other)


def test_it_goes_on_from_its_state_as_if_it_had_never_stopped() -> None:
    whole, halves = parameters(), parameters()
    take_steps(both(whole, 0.0), whole, range(6))
    first = both(halves, 0.0)
    take_steps(first, halves, range(3))
    second = both(halves, 0.0)
    second.load_state_dict(first.state_dict())
    take_steps(second, halves, range(3, 6))
    for mine, other in zip(halves, whole, strict=True):
        assert torch.equal(mine, other)


def test_weights_without_a_gradient_stay_and_the_closure_is_called_with_gradients() -> None:
    weights = parameters()
    before = [weight.detach().clone() for weight in weights]
    optimizer = both(weights, 0.1)

    def closure(only: int) -> float:
        loss = (weights[only] ** 2).sum()
        optimizer.zero_grad()
        loss.backward()
        return loss.item()

    for only in (0, 2):
        assert optimizer.step(partial(closure, only)) > 0
    changed = [not torch.equal(weight, old) for weight, old in zip(weights, before, strict=True)]
    assert changed == [True, False, True, False]
