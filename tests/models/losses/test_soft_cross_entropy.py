"""The chunked loss against an obvious one, and its gradients against finite differences."""

import pytest
import torch

from models.losses.soft_cross_entropy import TargetDistribution, soft_cross_entropy


def make(seed: int, dtype: torch.dtype, soft_cap: float | None = None):
    g = torch.Generator().manual_seed(seed)
    steps, positions, width, vocabulary, target_width = 3, 7, 5, 11, 6
    hidden = torch.randn(steps, positions, width, generator=g, dtype=dtype, requires_grad=True)
    head = torch.randn(vocabulary, width, generator=g, dtype=dtype, requires_grad=True)
    weights = torch.rand(steps, positions, generator=g, dtype=dtype)
    weights[torch.rand(steps, positions, generator=g) < 0.3] = 0
    last = torch.randn(positions, target_width, generator=g, dtype=dtype)
    target_head = torch.randn(vocabulary, target_width, generator=g, dtype=dtype)
    return hidden, head, weights, TargetDistribution(last, target_head, logit_scale=1.5, soft_cap=soft_cap)


def obvious(hidden, head, weights, target):
    total = torch.zeros((), dtype=hidden.dtype)
    correct = torch.zeros(hidden.shape[:2], dtype=torch.bool)
    for step in range(hidden.shape[0]):
        for position in range(hidden.shape[1]):
            logits = target.head @ target.last[position] * target.logit_scale
            if target.soft_cap is not None:
                logits = torch.tanh(logits / target.soft_cap) * target.soft_cap
            p = torch.exp(logits) / torch.exp(logits).sum()
            z = head @ hidden[step, position]
            q = torch.exp(z) / torch.exp(z).sum()
            total = total - weights[step, position] * (p * q.log()).sum()
            correct[step, position] = z.argmax() == logits.argmax()
    return total, correct


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_equals_the_obvious_loss_and_its_gradients(chunk, soft_cap):
    hidden, head, weights, target = make(chunk, torch.float64, soft_cap)
    loss, correct = soft_cross_entropy(hidden, head, weights, target, chunk)
    gradients = torch.autograd.grad(loss, (hidden, head))
    expected, expected_correct = obvious(hidden, head, weights, target)
    assert torch.allclose(loss, expected, rtol=1e-6)
    assert torch.equal(correct, expected_correct)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, (hidden, head)), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7)


def test_gradients_against_finite_differences():
    hidden, head, weights, target = make(3, torch.float64)
    assert torch.autograd.gradcheck(
        lambda h, w: soft_cross_entropy(h, w, weights, target, 2)[0], (hidden, head), eps=1e-6, atol=1e-6
    )


def test_float32_is_close_to_float64():
    hidden, head, weights, target = make(5, torch.float64)
    wide, _ = soft_cross_entropy(hidden, head, weights, target, 4)
    narrow_target = TargetDistribution(target.last.float(), target.head.float(), target.logit_scale)
    narrow, _ = soft_cross_entropy(hidden.float(), head.float(), weights.float(), narrow_target, 4)
    assert narrow.item() == pytest.approx(wide.item(), rel=1e-5)


def test_no_position_gives_zero():
    hidden, head, weights, target = make(1, torch.float64)
    loss, _ = soft_cross_entropy(hidden, head, torch.zeros_like(weights), target, 4)
    loss.backward()
    assert loss.item() == 0
    assert not hidden.grad.any()
    assert not head.grad.any()
