"""The chunked losses against obvious ones, and their gradients against finite differences."""

import math

import pytest
import torch

from models.config.draft_base import LossChoice
from models.losses.chunked import LossDivergence, TargetDistribution, chunked_loss
from models.losses.divergences import LKAlpha, LKLambda, SoftCrossEntropy, chosen_divergence

DIVERGENCES = [SoftCrossEntropy(), LKAlpha(), LKLambda(3.0), LKLambda(0.0)]
divergences = pytest.mark.parametrize("divergence", DIVERGENCES, ids=str)


def make(seed: int, dtype: torch.dtype, soft_cap: float | None = None, whole: bool = True):
    g = torch.Generator().manual_seed(seed)
    steps, positions, width, vocabulary, target_width = 3, 7, 5, 11, 6
    hidden = torch.randn(positions, steps, width, generator=g, dtype=dtype, requires_grad=True)
    head = torch.randn(vocabulary, width, generator=g, dtype=dtype, requires_grad=True)
    weights = torch.rand(positions, steps, generator=g, dtype=dtype)
    weights[torch.rand(positions, steps, generator=g) < 0.3] = 0
    last = torch.randn(positions, target_width, generator=g, dtype=dtype)
    # The target may know tokens that the draft does not.
    target_head = torch.randn(2 * vocabulary, target_width, generator=g, dtype=dtype)
    ids = torch.randperm(2 * vocabulary, generator=g)[:vocabulary].sort().values
    known = (target_head[ids], None) if whole else (target_head, ids)
    distribution = TargetDistribution(last, known[0], logit_scale=1.5, soft_cap=soft_cap, draft_ids=known[1])
    return hidden, head, weights, distribution


def shaped(logits, soft_cap):
    return logits * 1.5 if soft_cap is None else torch.tanh(logits * 1.5 / soft_cap) * soft_cap


def value(divergence: LossDivergence, p, share, q):
    """As the papers write it; `share` of the target's probability lies on `p`'s tokens."""
    if isinstance(divergence, SoftCrossEntropy):
        return -(p * q.log()).sum()
    acceptance = torch.minimum(share * p, q).sum()
    if isinstance(divergence, LKAlpha):
        return -acceptance.log()
    weight = torch.exp(-divergence.decay * acceptance.detach())
    return weight * (p * (p / q).log()).sum() + (1 - weight) * (1 - acceptance)


def obvious(hidden, head, weights, target, divergence=DIVERGENCES[0]):
    total = torch.zeros((), dtype=hidden.dtype)
    correct = torch.zeros(hidden.shape[:2], dtype=torch.bool)
    for position in range(hidden.shape[0]):
        everywhere = shaped(target.head @ target.last[position], target.soft_cap)
        ids = torch.arange(len(everywhere)) if target.draft_ids is None else target.draft_ids
        logits = everywhere[ids]
        for step in range(hidden.shape[1]):
            p = torch.exp(logits) / torch.exp(logits).sum()
            share = torch.exp(logits).sum() / torch.exp(everywhere).sum()
            z = head @ hidden[position, step]
            q = torch.exp(z) / torch.exp(z).sum()
            total = total + weights[position, step] * value(divergence, p, share, q)
            correct[position, step] = z.argmax() == logits.argmax()
    return total, correct


@divergences
@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
@pytest.mark.parametrize(("soft_cap", "whole"), [(None, True), (2.0, False)])
def test_equals_the_obvious_loss_and_its_gradients(chunk, soft_cap, whole, divergence):
    hidden, head, weights, target = make(chunk, torch.float64, soft_cap, whole)
    loss, correct, *_ = chunked_loss(hidden.unbind(1), head, weights, target, divergence, chunk)
    gradients = torch.autograd.grad(loss, (hidden, head))
    expected, expected_correct = obvious(hidden, head, weights, target, divergence)
    assert torch.allclose(loss, expected, rtol=1e-6)
    assert torch.equal(correct, expected_correct)
    for ours, theirs in zip(gradients, torch.autograd.grad(expected, (hidden, head)), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("divergence", [SoftCrossEntropy(), LKAlpha()], ids=str)
def test_gradients_against_finite_differences(divergence):
    """LKLambda's weight is taken as a constant, so its gradient is not the value's."""
    hidden, head, weights, target = make(3, torch.float64, whole=False)
    assert torch.autograd.gradcheck(
        lambda h, w: chunked_loss(h.unbind(1), w, weights, target, divergence, 2)[0],
        (hidden, head),
        eps=1e-6,
        atol=1e-6,
    )


@divergences
def test_float32_is_close_to_float64(divergence):
    hidden, head, weights, target = make(5, torch.float64)
    wide, *_ = chunked_loss(hidden.unbind(1), head, weights, target, divergence, 4)
    narrow_target = TargetDistribution(target.last.float(), target.head.float(), target.logit_scale)
    narrow, *_ = chunked_loss(hidden.float().unbind(1), head.float(), weights.float(), narrow_target, divergence, 4)
    assert narrow.item() == pytest.approx(wide.item(), rel=1e-5)


def test_hidden_states_that_nobody_else_needs_give_their_memory_to_their_gradients():
    hidden, head, weights, target = make(3, torch.float64, whole=False)
    loss, *_ = chunked_loss(hidden.unbind(1), head, weights, target, SoftCrossEntropy(), 3)
    expected = torch.autograd.grad(3 * loss, (hidden, head))
    given = [x.clone() for x in hidden.unbind(1)]
    again, *_ = chunked_loss(given, head, weights, target, SoftCrossEntropy(), 3, overwrite=True)
    assert torch.equal(again, loss)
    for found, wanted in zip(torch.autograd.grad(3 * again, (hidden, head)), expected, strict=True):
        assert torch.equal(found, wanted)
    assert torch.equal(torch.stack([x.detach() for x in given], dim=1), expected[0])


@divergences
def test_no_position_gives_zero(divergence):
    hidden, head, weights, target = make(1, torch.float64)
    loss, *_ = chunked_loss(hidden.unbind(1), head, torch.zeros_like(weights), target, divergence, 4)
    loss.backward()
    assert loss.item() == 0
    assert not hidden.grad.any()
    assert not head.grad.any()


@divergences
def test_a_frozen_head_has_no_gradient(divergence):
    hidden, head, weights, target = make(2, torch.float64)
    loss, *_ = chunked_loss(hidden.unbind(1), head, weights, target, divergence, 4)
    (expected,) = torch.autograd.grad(loss, hidden)
    frozen, *_ = chunked_loss(hidden.unbind(1), head.detach(), weights, target, divergence, 4)
    frozen.backward()
    assert torch.equal(hidden.grad, expected)


@pytest.mark.parametrize("divergence", [LKAlpha(), LKLambda(3.0)], ids=str)
def test_a_draft_that_is_sure_of_another_token_learns_in_float32(divergence):
    """Acceptance of e^-150 is no number of float32, its logarithm is one."""
    hidden = torch.tensor([[[150.0, 0.0]]], requires_grad=True)
    target = TargetDistribution(torch.tensor([[0.0, 300.0]]), torch.eye(2))
    loss, correct, *_ = chunked_loss(hidden.unbind(1), torch.eye(2), torch.ones(1, 1), target, divergence, 1)
    (slope,) = torch.autograd.grad(loss, hidden)
    assert not correct.any()
    assert loss.item() == pytest.approx(150, rel=0.02)
    assert slope.flatten().tolist() == pytest.approx([1, -1], rel=0.02)


def test_nothing_is_lost_where_the_draft_equals_the_target():
    """KL and TV are zero; -log of the acceptance rate is that of the share that the draft can express."""
    g = torch.Generator().manual_seed(0)
    last, head = torch.randn(6, 5, generator=g), torch.randn(9, 5, generator=g)
    # An unknown token twice as likely as the last known one, which is not the greatest.
    last[:, -1], head[:, -1], head[-1] = 1, 0, 0
    unknown = torch.tensor([[0, 0, 0, 0, math.log(2)]])
    whole = TargetDistribution(last, torch.cat([head, unknown]), draft_ids=torch.arange(9))
    p = (last @ head.T).exp().sum(-1)
    one = torch.ones(6, 1)
    alpha, *_ = chunked_loss([last], head, one, whole, LKAlpha(), 4)
    assert alpha.item() == pytest.approx(float(((p + 2) / p).log().sum()), rel=1e-5)
    blend, *_ = chunked_loss([last], head, one, TargetDistribution(last, head), LKLambda(3.0), 4)
    assert blend.item() == pytest.approx(0, abs=1e-5)


def test_a_configuration_names_its_divergence():
    found = [chosen_divergence(LossChoice.model_validate({"loss": name})) for name in ("kl", "lk_alpha", "lk_lambda")]
    assert found == [SoftCrossEntropy(), LKAlpha(), LKLambda(3.0)]
    assert chosen_divergence(LossChoice(loss="lk_lambda", lk_decay=1.0)) == LKLambda(1.0)
