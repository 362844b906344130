"""The online policy: exact choices in small cases, estimates by hand, lossless, and better than any fixed lookahead."""

import sys
from collections.abc import Sequence
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from text_by_text import TextByText

from models.decoding.plain import continue_greedily, prefill
from models.decoding.speculative import decode_together
from models.drafts.sampling import GREEDY

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from online_policy import Accepting, AdaptiveText, LookaheadPolicy

NEVER = frozenset()
rate = st.floats(0.0, 1.0)
seconds = st.floats(0.01, 2.0)


class Costs:
    """Of hardware that verifies `free` tokens at once for the price of one; drafting costs by token."""

    def __init__(self, free: int, per_token: float, draft: float):
        self.free, self.per_token, self.draft = free, per_token, draft

    def seconds(self, batch: int, lookahead: int) -> float:
        beyond = max(0, batch * (lookahead + 1) - self.free)
        return 1.0 + self.per_token * beyond + self.draft * lookahead


class Listed:
    """Seconds by lookahead, whatever the load."""

    def __init__(self, listed: list[float]):
        self.listed = listed

    def seconds(self, batch: int, lookahead: int) -> float:
        return self.listed[lookahead]


def emitted(rates: Sequence[float]) -> list[float]:
    """Tokens that a step is expected to emit, by lookahead from 0 on."""
    return [1 + sum(prod(rates[:at]) for at in range(1, lookahead + 1)) for lookahead in range(len(rates) + 1)]


@given(data=st.data(), batch=st.integers(1, 3), most=st.integers(1, 3))
def test_the_choice_is_the_best_of_all(data, batch, most):
    """By what every request is expected to emit; none has learnt anything yet, or all have learnt different things."""
    rates, listed = (
        data.draw(st.lists(of, min_size=size, max_size=size)) for of, size in ((rate, most), (seconds, most + 1))
    )
    policy = LookaheadPolicy(Listed(listed), rates)
    requests = [policy.request() for _ in range(batch)]
    for request in requests:
        for accepted in data.draw(st.lists(st.integers(0, most), max_size=4)):
            request.learn(most, accepted)
    expected = [sum(emitted(request.rates)[at] for request in requests) / listed[at] for at in range(most + 1)]
    assert expected[policy.choose(requests)] == pytest.approx(max(expected), rel=1e-9)


def test_what_a_text_accepts_decides_for_it():
    policy = LookaheadPolicy(Costs(free=100, per_token=0.0, draft=0.4), [0.6, 0.6, 0.6])
    good, bad = policy.request(), policy.request()
    for _ in range(50):
        good.learn(3, 3)
        bad.learn(3, 0)
    assert (policy.choose([good]), policy.choose([bad])) == (3, 0)


def test_estimates_by_hand():
    estimate = Accepting([0.5, 0.5], 2.0, 0.5)
    assert emitted(estimate.rates) == [1.0, 1.5, 1.75]
    estimate.learn(2, 1)
    # Position 1: one of one, position 2: none of one, each beside the prior's two steps.
    assert estimate.rates == pytest.approx([2 / 3, 1 / 3])
    estimate.learn(0, 0)
    assert estimate.rates == pytest.approx([1.5 / 2.5, 1 / 2.5])
    estimate.learn(1, 0)
    assert estimate.rates == pytest.approx([(1 + 0.25) / (2 + 1.25), 1 / 2.25])


def test_a_long_text_is_remembered_as_a_short_one():
    """Counts are kept in a unit that grows, and are brought back before it is too large."""
    estimate, by_hand = Accepting([0.5], 2.0, 0.5), [0.0, 0.0]
    for step in range(1000):
        estimate.learn(1, int(step % 3 == 0))
        by_hand = [0.5 * by_hand[0] + (step % 3 == 0), 0.5 * by_hand[1] + 1]
        assert estimate.rates == pytest.approx([(1 + by_hand[0]) / (2 + by_hand[1])])


def test_rejected_proposals_stop_proposing_and_a_lull_starts_it_again():
    policy = LookaheadPolicy(Costs(free=1, per_token=0.3, draft=0.05), [0.8] * 4)
    request = policy.request()
    assert policy.choose([request]) > 0
    for _ in range(12):
        request.learn(policy.choose([request]), 0)
    assert policy.choose([request]) == 0
    for _ in range(60):
        request.learn(0, 0)
    assert policy.choose([request]) > 0


def test_rates_that_are_none_are_refused_in_words():
    for rates in ([], [1.5]):
        with pytest.raises(ValueError, match="from 0 to 1"):
            LookaheadPolicy(Costs(1, 0.1, 0.1), rates)


class Attentive(TextByText):
    """Proposes as another source does, and checks that each proposer is handed every position's features once."""

    def __init__(self, source):
        self.source = source

    def proposer(self):
        return AttentiveProposer(self.source)


class AttentiveProposer:
    def __init__(self, source):
        self.source, self.seen = source, 0

    def propose(self, sequence, aux, lookahead):
        self.seen += len(aux)
        assert self.seen == len(sequence) - 1
        return self.source.propose(sequence, aux, lookahead)


@pytest.mark.parametrize("batch", [1, 5])
def test_decoding_with_a_policy_is_lossless(llama, oracle, batch):
    """The lookahead changes from step to step, 0 included; a stretch without proposals loses no features."""
    target = llama(3)
    generator = torch.Generator().manual_seed(4)
    prompts = [torch.randint(61, (5 + row,), generator=generator).tolist() for row in range(batch)]
    chosen = []
    for error_share in (0.0, 0.6, 1.0):
        costs = Costs(free=4 * batch, per_token=0.15 / batch, draft=0.12)
        policy = LookaheadPolicy(costs, [0.7] * 4, request_weight=1.0, all_weight=2.0)
        source = Attentive(oracle(target, error_share, 1))
        starts = [prefill(target, prompt) for prompt in prompts]
        texts = [
            AdaptiveText(policy, target, source, start, max_new_tokens=40, eos_ids=NEVER, sampling=GREEDY)
            for start in starts
        ]
        decode_together(texts, choose=policy.step)
        for prompt, text in zip(prompts, texts, strict=True):
            assert text.tokens == continue_greedily(target, prompt, 40, NEVER)
            assert len(text.lookaheads) == len(text.accepted) + text.cut
            assert all(accepted <= at for accepted, at in zip(text.accepted, text.lookaheads, strict=False))
            chosen.append(text.lookaheads)
    assert {0, 3} <= {at for each in chosen for at in each}
    assert sum(chosen[0]) / len(chosen[0]) > sum(chosen[-1]) / len(chosen[-1])


LOADS = [1, 2, 4, 8, 16, 32, 48, 32, 16, 8, 4, 2, 1]
SECONDS, MOST = 60.0, 6
"""Of each load; as many texts as there are wait, however long a step takes."""


@pytest.mark.parametrize("truth", [0.85, 0.6, 0.05])
@pytest.mark.parametrize("prior", [0.9, 0.4])
def test_under_a_rising_and_falling_load_no_fixed_lookahead_is_better(truth, prior):
    """True costs, acceptance that the policy must find out; requests come and go. Expected tokens in the same time."""
    costs, generator = Costs(free=24, per_token=0.04, draft=0.06), torch.Generator().manual_seed(1)
    expected = emitted([truth] * MOST)
    fixed = [sum(load * expected[at] / costs.seconds(load, at) for load in LOADS) * SECONDS for at in range(MOST + 1)]
    policy, tokens = LookaheadPolicy(costs, [prior] * MOST), 0.0
    for load in LOADS:
        requests, left = [policy.request() for _ in range(load)], SECONDS
        while left > 0:
            at = policy.choose(requests)
            step = costs.seconds(load, at)
            tokens += load * expected[at] * min(1.0, left / step)
            left -= step
            runs = (torch.rand(load, MOST, generator=generator) < truth).long().cumprod(1).sum(1).tolist()
            for request, run in zip(requests, runs, strict=True):
                request.learn(at, min(run, at))
    assert fixed.index(max(fixed)) == {0.85: 2, 0.6: 1, 0.05: 0}[truth], "the best fixed one differs, or this is easy"
    # Where next to nothing is accepted, trying now and then is all that separates the policy from never proposing.
    assert tokens >= {0.85: 1.1, 0.6: 1.1, 0.05: 0.98}[truth] * max(fixed), (tokens, fixed)
