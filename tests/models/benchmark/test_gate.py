import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from models.benchmark.config import PromotionConfig
from models.benchmark.gate import Evidence, decide
from models.decoding.counts import Counts

GOOD = Evidence(distinct_token_share=0.5, min_distinct_token_share=0.05, mismatches=0, gap=0.01)
PROMOTION = PromotionConfig(resamples=1000)
RECORDS = Path(__file__).parents[3] / "benchmarks" / "results" / "gate_records.json"


def walks(rate: float, seed: int = 0, number: int = 60) -> list[Counts]:
    """Conversations in which each of four positions is accepted at `rate`."""
    rng = np.random.default_rng(seed)
    accepted = np.minimum(rng.geometric(1 - rate, (number, 25)) - 1, 4) if rate else np.zeros((number, 25), dtype=int)
    return [Counts(4, tuple(row.tolist())) for row in accepted]


@pytest.mark.parametrize(
    ("challenger", "champion", "passed", "against"),
    [
        (0.5, None, True, "no draft"),
        (0.0, None, False, "no draft"),
        (0.005, None, False, "no draft"),  # better, but not by the margin
        (0.6, 0.4, True, "version 3"),
        (0.4, 0.6, False, "version 3"),
        (0.51, 0.5, False, "version 3"),  # better, but not beyond doubt
        (0.0, 0.5, False, "no draft"),  # what does not beat nothing is told so first
    ],
)
def test_acceptance_decides(challenger, champion, passed, against):
    other = None if champion is None else walks(champion, seed=1)
    decision = decide(walks(challenger), other, "version 3", GOOD, PROMOTION)
    assert (decision.passed, decision.against) == (passed, against)
    assert (decision.lower_bound > decision.margin) == passed
    assert decision.lower_bound <= decision.difference
    assert decision.smallest_detectable > decision.margin or challenger == 0.0
    assert decision.difference == pytest.approx(decision.challenger / decision.champion - 1)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"distinct_token_share": 0.03}, "degenerate"),
        ({"mismatches": 1}, "lossless"),
        ({"gap": 0.06}, "reference"),
        ({"gap": -0.06}, "reference"),
    ],
)
def test_an_objection_blocks_the_best_draft(change, word):
    decision = decide(walks(0.8), walks(0.2, seed=1), "version 3", replace(GOOD, **change), PROMOTION)
    assert not decision.passed
    assert word in decision.reason
    assert decision.lower_bound > decision.margin


def test_limits_themselves_are_allowed():
    edge = Evidence(distinct_token_share=0.05, min_distinct_token_share=0.05, mismatches=0, gap=0.05)
    assert decide(walks(0.8), None, "", edge, PROMOTION).passed


def test_the_same_draft_never_replaces_itself():
    assert not decide(walks(0.5), walks(0.5), "version 1", GOOD, PROMOTION).passed


def test_noise_alone_is_rarely_promoted():
    """A real draft against itself, each side on conversations of its own: what pairing takes away is all there."""
    rows = json.loads(RECORDS.read_text())["greedy"]
    rng, gates = np.random.default_rng(1), 400
    promoted = would_be = 0
    for _ in range(gates):
        sides = ([one_step(rows[row]) for row in rng.integers(len(rows), size=32)] for _ in range(2))
        decision = decide(*sides, "itself", GOOD, PromotionConfig(resamples=400))
        promoted += decision.passed
        would_be += decision.difference > decision.margin
    assert promoted / gates <= 0.05
    assert would_be / gates > 0.3  # by a gate that ignores its bound


def one_step(row: list[int]) -> Counts:
    """Counts of these (tokens, steps); how the accepted tokens fall on the steps is of no account here."""
    tokens, steps = row
    return Counts(4, (tokens - steps, *[0] * (steps - 1)))
