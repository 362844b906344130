import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.records.acceptance import GateEvidence, Ground
from models.benchmark.categories import by_context, groups, holm, judge_categories, suite_result
from models.benchmark.gate import decide
from models.benchmark.paired import paired_difference

RECORDS = Path(__file__).parents[3] / "benchmarks" / "results" / "gate_records.json"
Sums = tuple[tuple[int, int], ...]


def sums(rate: float, number: int, seed: int) -> Sums:
    """Conversations of 25 steps in which each of four positions is accepted at `rate`: tokens and steps."""
    rng = np.random.default_rng(seed)
    accepted = np.minimum(rng.geometric(1 - rate, (number, 25)) - 1, 4)
    return tuple((int(row.sum()) + 25, 25) for row in accepted)


def evidence(challenger: Sums, champion: Sums | None, labels: tuple[str, ...], **more: float) -> GateEvidence:
    ground = Ground(
        name="suite", dataset_hash="d", margin=-0.5, challenger=challenger, champion=champion, categories=labels
    )
    return GateEvidence(
        champion_label="version 3", lookahead=4, max_gap=0.05,
        min_distinct_token_share=0.05, distinct_token_share=0.5, mismatches=0, gap=0.0, grounds=(ground,), **more,
    )  # fmt: skip


def test_a_category_that_got_worse_blocks_what_is_better_in_all():
    better, worse, before = sums(0.7, 60, 0), sums(0.3, 30, 1), sums(0.5, 90, 2)
    found = evidence(better + worse, before, ("chat",) * 60 + ("code",) * 30)
    decision = decide(found)
    assert decision.grounds[0].passed
    assert not decision.passed
    assert "worse than the champion on code of suite" in decision.reason
    chat, code = decision.categories
    assert (chat.category, chat.prompts, chat.blocks, chat.p) == ("chat", 60, False, pytest.approx(1.0))
    assert (code.prompts, code.blocks) == (30, True)
    assert code.difference == pytest.approx(code.challenger / code.champion - 1)
    assert code.smallest_detectable is not None
    assert 0.05 < code.smallest_detectable < -code.difference
    assert decide(found.model_copy(update={"category_tolerance": 0.6})).passed


def test_without_champion_or_categories_nothing_is_judged():
    same = sums(0.5, 40, 0)
    assert judge_categories(evidence(same, None, ("a",) * 40)) == ()
    assert judge_categories(evidence(same, same, ())) == ()


def test_small_categories_are_pooled_and_a_small_pool_blocks_nothing():
    labels = ("large",) * 20 + ("a",) * 12 + ("b",) * 9
    ours, theirs = sums(0.2, 41, 0), sums(0.6, 41, 1)
    decisions = judge_categories(evidence(ours, theirs, labels))
    assert [(each.category, each.prompts, each.blocks) for each in decisions] == [
        ("large", 20, True),
        ("pooled (a, b)", 21, True),
    ]
    few = judge_categories(evidence(ours[:32], theirs[:32], labels[:32]))
    assert [(each.category, each.p, each.smallest_detectable, each.blocks) for each in few[1:]] == [
        ("a", None, None, False)
    ]


@given(labels=st.lists(st.sampled_from("abcdef"), max_size=90), least=st.integers(1, 30))
def test_groups_hold_every_conversation_once(labels: list[str], least: int):
    found = groups(labels, least)
    assert sorted(row for rows in found.values() for row in rows) == list(range(len(labels)))
    assert all(len(rows) >= least for rows in list(found.values())[:-1])
    for name, rows in found.items():
        of = {labels[row] for row in rows}
        assert of == {name} or name == f"pooled ({', '.join(dict.fromkeys(labels[row] for row in rows))})"
        assert all(labels.count(label) < least for label in of) or len(of) == 1


@given(contexts=st.lists(st.integers(1, 20_000), max_size=40))
def test_ranges_of_context_hold_every_conversation_once(contexts: list[int]):
    found = by_context(contexts)
    assert sorted(row for rows in found.values() for row in rows) == list(range(len(contexts)))
    for name, rows in found.items():
        low, high = (int(part) for part in name.split(" to ")) if " to " in name else (8193, 10**9)
        assert all(low <= contexts[row] <= high for row in rows)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm(values: list[float]):
    """Step down: going through ascending p-values, stop at the first that its own threshold does not reject."""
    adjusted = holm(values)
    rejected, order = set(), sorted(range(len(values)), key=lambda at: values[at])
    for rank, at in enumerate(order):
        if values[at] * (len(values) - rank) >= 0.05:
            break
        rejected.add(at)
    assert {at for at, p in enumerate(adjusted) if p < 0.05} == rejected
    assert all(p <= after <= 1 for p, after in zip(values, adjusted, strict=True))


def test_a_draft_that_is_as_good_is_rarely_blocked():
    """Six categories of 25 prompts, challenger and champion drawn from the same real conversations, tolerance 0: the
    worst that is still allowed. In all, at most one decision in twenty errs; by raw p-values four times as many do."""
    rows = np.array(json.loads(RECORDS.read_text())["greedy"], dtype=np.int64)
    rng, decisions, count = np.random.default_rng(7), 600, 6
    blocked = raw = 0
    for _ in range(decisions):
        values = []
        for _ in range(count):
            sides = (rows[rng.integers(len(rows), size=25)] for _ in range(2))
            values.append(paired_difference(*sides).p(0.0))
        blocked += min(holm(values)) < 0.05
        raw += min(values) < 0.05
    assert blocked / decisions <= 0.05 + 2 * (0.05 * 0.95 / decisions) ** 0.5
    assert raw / decisions > 0.15


def test_the_smallest_detectable_worsening_is_detected_four_times_of_five():
    """The champion accepts so much more that the true difference is what such decisions name, in the mean."""
    number, tries = 60, 300
    rng = np.random.default_rng(3)
    theirs = np.stack([rng.poisson(60, (tries, number)), np.full((tries, number), 25)], axis=-1)
    same = [paired_difference(one, other) for one, other in zip(theirs[::2], theirs[1::2], strict=True)]
    named = float(np.mean([each.smallest_worsening(0.05, 0.95) for each in same]))
    assert 0.05 < named < 0.2
    ours = np.stack([rng.poisson(60 * (1 - named), (tries, number)), np.full((tries, number), 25)], axis=-1)
    found = sum(paired_difference(mine, other).p(-0.05) < 0.05 for mine, other in zip(ours, theirs, strict=True))
    assert 0.7 < found / tries < 0.9


def test_a_suite_is_shown_by_category_and_context():
    ground = Ground(
        name="s", dataset_hash="d", margin=0.0, challenger=((6, 3), (4, 4), (8, 2), (0, 0)), champion=None,
        categories=("b", "a", "b", "c"), contexts=(10, 200, 128, 9000),
    )  # fmt: skip
    shown = suite_result(ground, 0.4, 7)
    assert (shown.whole.length, shown.whole.conversations, shown.whole.steps, shown.too_long) == (2.0, 4, 9, 7)
    assert [(part.group, part.length) for part in shown.by_category] == [("b", 14 / 5), ("a", 1.0), ("c", None)]
    assert [(part.group, part.conversations) for part in shown.by_context] == [
        ("1 to 128", 2), ("129 to 512", 1), ("over 8192", 1),
    ]  # fmt: skip
