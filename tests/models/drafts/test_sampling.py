import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.drafts.sampling import FEW, GREEDY, Sampling, draw_by


def slow_distribution(logits: list[float], temperature: float, top_p: float, top_k: int = 0) -> list[float]:
    """By the words of the definition, in Python's floats."""
    weights = [2.718281828459045 ** ((logit - max(logits)) / temperature) for logit in logits]
    if top_k:
        least = sorted(weights, reverse=True)[:top_k][-1]
        weights = [weight if weight >= least else 0.0 for weight in weights]
    shares = [weight / sum(weights) for weight in weights]
    nucleus, reached = set(), 0.0
    for token in sorted(range(len(shares)), key=lambda token: -shares[token]):
        if top_p < 1 and reached >= top_p:
            break
        nucleus.add(token)
        reached += shares[token]
    kept = [share if token in nucleus else 0.0 for token, share in enumerate(shares)]
    return [share / sum(kept) for share in kept]


@given(
    seed=st.integers(0, 10_000),
    size=st.integers(1, 40),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.5]),
    top_p=st.sampled_from([1e-6, 0.31, 0.8, 0.953, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 20, 64]),
)
def test_temperature_then_top_k_then_top_p(seed, size, temperature, top_p, top_k):
    logits = torch.randn(2, 3, size, generator=torch.Generator().manual_seed(seed)) * 3
    found = Sampling(temperature, top_p, top_k=top_k).distribution(logits)
    expected = [[slow_distribution(row, temperature, top_p, top_k) for row in rows] for rows in logits.tolist()]
    assert found.dtype == torch.float32
    assert torch.allclose(found.double(), torch.tensor(expected, dtype=torch.double), atol=1e-5)
    assert torch.equal(found > 0, torch.tensor(expected) > 0)


@pytest.mark.parametrize("spread", [[0.2], [4.0], [0.2, 4.0]])
def test_a_large_vocabulary_with_large_and_small_nuclei(spread):
    normal = torch.randn(len(spread), 3 * FEW, generator=torch.Generator().manual_seed(3))
    logits = normal * torch.tensor(spread)[:, None]
    found = Sampling(1.0, 0.9).distribution(logits)
    expected = torch.tensor([slow_distribution(row, 1.0, 0.9) for row in logits.tolist()], dtype=torch.double)
    assert torch.allclose(found.double(), expected, atol=1e-6)
    sizes = (expected > 0).sum(-1)
    assert all((size > FEW) == (one < 1) for size, one in zip(sizes.tolist(), spread, strict=True))


def test_the_token_that_reaches_top_p_is_kept():
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    assert Sampling(1.0, 0.5).distribution(logits).tolist() == [1.0, 0, 0, 0]
    assert Sampling(1.0, 0.51).distribution(logits).tolist() == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert Sampling(1.0, 0.76).distribution(logits).count_nonzero() == 3


def test_draws_follow_weights_that_need_not_sum_to_one():
    weights = torch.tensor([0.0, 3.0, 0.0, 1.0, 0.0])
    sampling = Sampling(1.0, generator=torch.Generator().manual_seed(0))
    counts = sampling.draw(weights.expand(40_000, 5)).bincount(minlength=5)
    assert counts[[0, 2, 4]].tolist() == [0, 0, 0]
    # Five standard deviations of a share over 40,000 draws.
    assert abs(counts[1] / 40_000 - 0.75) < 5 * (0.75 * 0.25 / 40_000) ** 0.5


@pytest.mark.parametrize(("at", "drawn"), [(0.0, 3), (1 - 2.0**-53, 1)])
def test_the_ends_of_the_range_give_tokens_that_have_weight(at, drawn):
    weights = torch.tensor([[0.0, 1e-9, 0.3, 0.7, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0]])
    assert draw_by(weights, torch.full((2,), at, dtype=torch.double)).tolist() == [drawn, 0]


def test_choosing_greedily_needs_no_randomness():
    logits = torch.randn(20, 9, generator=torch.Generator().manual_seed(1))
    before = torch.get_rng_state()
    assert GREEDY.choose(logits).tolist() == logits.argmax(-1).tolist()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_nucleus_of_one_token_is_greedy():
    logits = torch.randn(200, 9, generator=torch.Generator().manual_seed(1))
    assert Sampling(1.0, 1e-9).choose(logits).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(-0.1, 1.0, 0), (1.0, 0.0, 0), (1.0, 1.1, 0), (1.0, 1.0, -1)]
)
def test_nonsense_is_refused(temperature, top_p, top_k):
    with pytest.raises(ValueError, match=r"temperature|top-p|top-k"):
        Sampling(temperature, top_p, top_k=top_k)
