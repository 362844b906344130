import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infra.records.acceptance import GateEvidence, Ground, GroundAtLoad, SideAtLoad
from infra.records.goodput import GoodputAtLoad, GoodputEvidence
from models.benchmark.gate import decide

Sums = tuple[tuple[int, int], ...]
RECORDS = Path(__file__).parents[3] / "benchmarks" / "results" / "gate_records.json"


def sums(rate: float, seed: int = 0, number: int = 60) -> Sums:
    """Conversations of 25 steps in which each of four positions is accepted at `rate`: tokens and steps."""
    rng = np.random.default_rng(seed)
    accepted = np.minimum(rng.geometric(1 - rate, (number, 25)) - 1, 4) if rate else np.zeros((number, 25), dtype=int)
    return tuple((int(row.sum()) + 25, 25) for row in accepted)


def ground(challenger: Sums, champion: Sums | None = None, name: str = "held-out prompts", **more: Any) -> Ground:
    return Ground(name=name, dataset_hash="d", margin=0.01, challenger=challenger, champion=champion, **more)


def evidence(*grounds: Ground, **facts: float) -> GateEvidence:
    known = {"distinct_token_share": 0.5, "mismatches": 0, "gap": 0.01}
    settings = {"champion_label": "version 3", "lookahead": 4, "max_gap": 0.05, "min_distinct_token_share": 0.05}
    return GateEvidence.model_validate({**settings, **known, **facts, "grounds": grounds})


@pytest.mark.parametrize(
    ("challenger", "champion", "passed", "against"),
    [
        (0.5, None, True, "no draft"),
        (0.0, None, False, "no draft"),
        (0.005, None, False, "no draft"),  # better, but not by the margin
        (0.6, 0.4, True, "version 3"),
        (0.4, 0.6, False, "version 3"),
        (0.51, 0.5, False, "version 3"),  # better, but not beyond doubt
        (0.0, 0.5, False, "no draft"),  # a draft that loses to no draft is refused for that first
    ],
)
def test_acceptance_decides(challenger: float, champion: float | None, passed: bool, against: str):
    other = None if champion is None else sums(champion, seed=1)
    decision = decide(evidence(ground(sums(challenger), other)))
    assert (decision.passed, decision.against) == (passed, against)
    assert (decision.lower_bound > decision.margin) == passed
    assert decision.lower_bound <= decision.difference
    assert decision.smallest_detectable > decision.margin or challenger == 0.0
    assert decision.difference == pytest.approx(decision.challenger / decision.champion - 1)


@pytest.mark.parametrize(
    ("challenger", "champion", "facts", "unproven"),
    [
        (0.505, 0.5, {}, True),
        (0.48, 0.5, {}, False),
        (0.6, 0.4, {}, False),  # it is proven
        (0.003, None, {}, True),
        (0.505, 0.5, {"mismatches": 1}, False),  # a fault, whatever it gains
        (0.003, 0.5, {}, False),  # ahead of no draft, behind the champion
    ],
)
def test_a_draft_is_unproven_where_certainty_alone_is_missing(
    challenger: float, champion: float | None, facts: dict[str, float], unproven: bool
):
    other = None if champion is None else sums(champion, seed=2)
    decision = decide(evidence(ground(sums(challenger, seed=2), other), **facts))
    assert decision.unproven == unproven
    assert not (decision.unproven and decision.passed)


@pytest.mark.parametrize(
    ("fact", "word"),
    [
        ({"distinct_token_share": 0.03}, "degenerate"),
        ({"mismatches": 1}, "lossless"),
        ({"gap": 0.06}, "reference"),
        ({"gap": -0.06}, "reference"),
        ({"served_gap": -0.06}, "serving engine"),
    ],
)
def test_an_objection_blocks_the_best_draft(fact: dict[str, float], word: str):
    decision = decide(evidence(ground(sums(0.8), sums(0.2, seed=1)), **fact))
    assert not decision.passed
    assert word in decision.reason
    assert decision.lower_bound > decision.margin


def at_load(batch: int, challenger: float, champion: float | None) -> GoodputAtLoad:
    """Challenger at lookahead 3, champion at 2."""
    return GoodputAtLoad(
        batch=batch, challenger=challenger, challenger_lookahead=3, champion=champion,
        champion_lookahead=None if champion is None else 2,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("champion", "passed"), [((100.0, 400.0), True), ((105.0, 420.0), True), ((90.0, 450.0), False), (None, True)]
)
def test_goodput_at_every_load_may_fall_by_so_much(champion: tuple[float, float] | None, passed: bool):
    """A longer acceptance does not help a draft that takes too long to propose."""
    first, second = champion or (None, None)
    goodput = GoodputEvidence(max_loss=0.05, loads=(at_load(1, 100.0, first), at_load(16, 400.0, second)))
    found = evidence(ground(sums(0.8), sums(0.2, seed=1))).model_copy(update={"goodput": goodput})
    decision = decide(GateEvidence.model_validate_json(found.model_dump_json()))
    assert decision.passed == passed
    assert decision.lower_bound > decision.margin
    if not passed:
        assert decision.reason.startswith(
            "goodput falls with 16 at once: 400.0 tokens/s at lookahead 3, 450.0 of version 3"
        )
        assert "11.1% less" in decision.reason


NGRAM = "--speculative-algorithm NGRAM --speculative-num-draft-tokens 5 --speculative-ngram-max-bfs-breadth 1"


def at(batch: int, draft: tuple[float, float], lookup: float, champion: float | None = None) -> GroundAtLoad:
    """Acceptance rates of draft, prompt lookup and champion, and what a step with a draft costs (without: 1)."""

    def side(rate: float, step_s: float, seed: int) -> SideAtLoad:
        return SideAtLoad(lookahead=4, step_s=step_s, rows=sums(rate, seed))

    return GroundAtLoad(
        batch=batch, plain_step_s=1.0, challenger=side(*draft, 0), prompt_lookup=side(lookup, 1.1, 1),
        champion=None if champion is None else side(champion, draft[1], 2),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("loads", "passed", "against", "load", "instead", "arguments"),
    [
        # Better everywhere.
        ([at(1, (0.6, 1.3), 0.2), at(16, (0.6, 1.5), 0.2)], True, "prompt lookup", 16, None, ""),
        ([at(1, (0.6, 1.3), 0.2, 0.4)], True, "version 3", 1, None, ""),
        # Prompt lookup accepts more, or the same for a cheaper step.
        ([at(1, (0.4, 1.3), 0.6)], False, "prompt lookup", 1, "prompt lookup", NGRAM),
        ([at(1, (0.5, 1.5), 0.5)], False, "prompt lookup", 1, "prompt lookup", NGRAM),
        # Better with one text at once, but its steps do not pay with 16.
        ([at(1, (0.6, 1.3), 0.0), at(16, (0.6, 3.0), 0.0)], False, "no draft", 16, "no draft", ""),
        # A champion that beats prompt lookup goes on serving.
        ([at(1, (0.4, 1.3), 0.5, 0.8)], False, "prompt lookup", 1, None, ""),
        # Better than prompt lookup, but not better than nothing by the margin.
        ([at(1, (0.6, 2.25), 0.1)], False, "no draft", 1, None, ""),
        # Nothing without training wins, the champion does.
        ([at(1, (0.5, 1.3), 0.1, 0.8)], False, "version 3", 1, None, ""),
    ],
)  # fmt: skip
def test_the_gate_asks_what_a_user_would_ask(
    loads: list[GroundAtLoad], passed: bool, against: str, load: int, instead: str | None, arguments: str
):
    decision = decide(evidence(ground(sums(0.6), loads=tuple(loads))))
    assert (decision.passed, decision.against, decision.load) == (passed, against, load)
    assert (decision.instead, " ".join(decision.instead_arguments)) == (instead, arguments)
    assert f"tokens/s with {load} text" in decision.reason
    advice = {None: "", "no draft": "; serve without a draft", "prompt lookup": "; serve with prompt lookup, which"}
    assert advice[instead] in decision.reason
    assert ("serve with" in decision.reason) == (instead is not None)
    assert "-" not in decision.reason.partition("`")[0], "minus signs are those of all other pages"
    assert arguments in decision.reason


def test_prompt_lookup_is_a_rival_by_tokens_per_step_too():
    decision = decide(evidence(ground(sums(0.4), prompt_lookup=sums(0.6, seed=1))))
    assert (decision.passed, decision.against, decision.instead) == (False, "prompt lookup", "prompt lookup")
    assert " ".join(decision.instead_arguments) == NGRAM
    assert decide(evidence(ground(sums(0.6), prompt_lookup=sums(0.4, seed=1)))).passed


def test_what_was_not_measured_is_said():
    found = evidence(ground(sums(0.6))).model_copy(update={"caveat": "decided on greedy text"})
    assert decide(found).reason.endswith("; decided on greedy text")


def test_limits_themselves_are_allowed():
    assert decide(evidence(ground(sums(0.8)), distinct_token_share=0.05, gap=0.05)).passed


def test_the_same_draft_never_replaces_itself():
    assert not decide(evidence(ground(sums(0.5), sums(0.5)))).passed


def test_every_ground_must_be_passed():
    better, same = ground(sums(0.6), sums(0.4, seed=1)), ground(sums(0.4), sums(0.4, seed=1), "suite")
    both = decide(evidence(better, better.model_copy(update={"name": "suite"})))
    assert both.passed
    assert [judged.ground for judged in both.grounds] == ["held-out prompts", "suite"]
    assert "on held-out prompts" in both.reason
    assert "on suite" in both.reason
    for order in ((better, same), (same, better)):
        decision = decide(evidence(*order))
        assert not decision.passed
        assert decision.ground == "suite"
        assert "on suite" in decision.reason
        assert decision.lower_bound <= decision.margin


def test_a_negative_margin_allows_to_be_no_worse_than_that():
    suite = ground(sums(0.5), sums(0.5, seed=1), "suite")
    assert not decide(evidence(suite)).passed
    assert decide(evidence(suite.model_copy(update={"margin": -0.2}))).passed


def test_a_decision_follows_from_its_evidence_alone():
    found = evidence(ground(sums(0.6), sums(0.4, seed=1)))
    assert decide(GateEvidence.model_validate_json(found.model_dump_json())) == decide(found)


def test_noise_alone_is_rarely_promoted():
    """A real draft against itself, each side on conversations of its own: what pairing takes away is all there."""
    rows = json.loads(RECORDS.read_text())["greedy"]
    rng, gates = np.random.default_rng(1), 400
    promoted = would_be = 0
    for _ in range(gates):
        sides = (tuple(tuple(rows[row]) for row in rng.integers(len(rows), size=32)) for _ in range(2))
        decision = decide(evidence(ground(*sides)))
        promoted += decision.passed
        would_be += decision.difference > decision.margin
    assert promoted / gates <= 0.05
    assert would_be / gates > 0.3  # by a gate that ignores its bound
