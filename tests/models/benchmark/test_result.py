"""What the gate's evidence is made of: the texts that are like the recipe's traffic."""

import random

import pytest

from infra.records.acceptance import LosslessRecord
from models.benchmark.gate import decide
from models.benchmark.measure import CHAMPION, DRAFT, PROMPT_LOOKUP, Measurements, Walk, WalkedTexts
from models.benchmark.reference import ReferenceRun, speed_record
from models.benchmark.result import gather
from models.config.benchmark import BenchmarkConfig, PromotionConfig, TrafficConfig
from models.decoding.acceptance import AcceptedCounts
from models.decoding.speculative import Decoded

CONVERSATIONS, STEPS, LOOKAHEAD = 40, 25, 4


def walk(rate: float, seed: int) -> Walk:
    """Each proposal is accepted at `rate`, once all before it were."""
    rng = random.Random(seed)

    def step(lookahead: int) -> int:
        return next((number for number in range(lookahead) if rng.random() > rate), lookahead)

    def counts(lookahead: int) -> AcceptedCounts:
        return AcceptedCounts(lookahead, tuple(step(lookahead) for _ in range(STEPS)))

    return [tuple(counts(lookahead) for lookahead in range(1, LOOKAHEAD + 1)) for _ in range(CONVERSATIONS)]


def walked(draft: float, champion: float, lookup: float) -> WalkedTexts:
    walks = {DRAFT: walk(draft, 0), CHAMPION: walk(champion, 1), PROMPT_LOOKUP: walk(lookup, 2)}
    return WalkedTexts([[number % 7 for number in range(STEPS)]] * CONVERSATIONS, walks, {})


@pytest.mark.parametrize(
    ("sampling", "passed", "against"), [("greedy", True, "version 3"), ("sampled", False, "version 3")]
)
def test_better_greedy_but_worse_sampled_is_decided_by_the_traffic(sampling: str, passed: bool, against: str) -> None:
    greedy, sampled = walked(0.6, 0.4, 0.2), walked(0.3, 0.5, 0.1)
    real = tuple(Decoded([], counts[LOOKAHEAD - 1]) for counts in greedy.walks[DRAFT])
    lossless, speed = LosslessRecord(tokens=100, mismatches=0, ties=0, divergences=()), speed_record(100, 1.0, 0.5, 2.0)
    reference = ReferenceRun(real, (lossless,), speed)
    found = Measurements(greedy, sampled, reference, greedy.walks[DRAFT])
    promotion = PromotionConfig(traffic=TrafficConfig.model_validate({"sampling": sampling, "loads": []}))
    evidence = gather(
        found, [], BenchmarkConfig(lookahead=LOOKAHEAD, min_distinct_token_share=0.001), promotion, dataset_hash="d",
        champion_label="version 3", served_gap=None, goodput=None,
    )  # fmt: skip
    decision = decide(evidence)
    assert (decision.passed, decision.against) == (passed, against), decision.reason
