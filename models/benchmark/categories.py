"""Acceptance by category and by the length of the prompt, and the categories that block a challenger."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from infra.records.acceptance import CategoryDecision, GateEvidence, Ground, GroupAcceptance, SuiteResult
from models.benchmark.paired import Rows, paired_difference

LEAST_PROMPTS = 20
"""Minimum number of prompts of a category that is judged separately."""
LEVEL = 0.05
CONTEXT_BOUNDS = (128, 512, 2048, 8192)
"""Prompt tokens, each the largest of its range."""

Groups = dict[str, list[int]]
"""Rows of the conversations that are shown as one, by name."""


def groups(labels: Sequence[str], least: int = LEAST_PROMPTS) -> Groups:
    """Categories in the order of their first conversation; those under `least` conversations are pooled as the last."""
    found: Groups = {}
    for row, label in enumerate(labels):
        found.setdefault(label, []).append(row)
    small = [label for label, rows in found.items() if len(rows) < least]
    pooled = sorted(row for label in small for row in found.pop(label))
    name = small[0] if len(small) == 1 else f"pooled ({', '.join(small)})"
    return found | {name: pooled} if small else found


def by_context(contexts: Sequence[int]) -> Groups:
    """Conversations by prompt tokens, short ones first; ranges without a conversation are left out."""
    names = [f"{low + 1} to {high}" for low, high in pairwise((0, *CONTEXT_BOUNDS))] + [f"over {CONTEXT_BOUNDS[-1]}"]
    found: Groups = {name: [] for name in names}
    for row, tokens in enumerate(contexts):
        found[names[bisect_left(CONTEXT_BOUNDS, tokens)]].append(row)
    return {name: rows for name, rows in found.items() if rows}


def judge_categories(evidence: GateEvidence) -> tuple[CategoryDecision, ...]:
    """Every category against the champion; all that are judged are one family of Holm's."""
    compared = [
        _compare(ground, name, rows, evidence)
        for ground in evidence.grounds
        if ground.champion is not None and ground.categories
        for name, rows in groups(ground.categories).items()
    ]
    adjusted = iter(holm([each.p for each in compared if each.p is not None]))
    judged = [each.model_copy(update={"p": next(adjusted)}) if each.p is not None else each for each in compared]
    return tuple(each.model_copy(update={"blocks": each.p is not None and each.p < LEVEL}) for each in judged)


def holm(values: Sequence[float]) -> list[float]:
    """p-values adjusted for their number (Holm 1979): whatever is below the level then errs at most that often in all.

    The adjusted value of the i-th smallest of m is the largest of (m - j) p_j over j <= i, at most 1.
    """
    order = sorted(range(len(values)), key=lambda at: values[at])
    adjusted, largest = [0.0] * len(values), 0.0
    for rank, at in enumerate(order):
        largest = max(largest, min(1.0, (len(values) - rank) * values[at]))
        adjusted[at] = largest
    return adjusted


def _compare(ground: Ground, name: str, rows: Sequence[int], evidence: GateEvidence) -> CategoryDecision:
    """The decision before p-values are adjusted."""
    ours, theirs = (_rows(side, rows) for side in (ground.challenger, ground.champion or ()))
    judged = len(ours) >= LEAST_PROMPTS and min(ours[:, 1].sum(), theirs[:, 1].sum()) > 0
    tolerance, found = evidence.category_tolerance, paired_difference(ours, theirs) if judged else None
    first, second = _length(ours), _length(theirs)
    return CategoryDecision(
        ground=ground.name,
        category=name,
        prompts=len(ours),
        challenger=first,
        champion=second,
        difference=first / second - 1,
        p=found and found.p(-tolerance),
        smallest_detectable=found and found.smallest_worsening(tolerance, 1 - LEVEL),
        blocks=False,
    )


def suite_result(ground: Ground, distinct_token_share: float, too_long: int = 0) -> SuiteResult:
    """A ground's acceptance in all, by category and by context."""

    def shown(named: Groups) -> tuple[GroupAcceptance, ...]:
        return tuple(_shown(ground, name, rows) for name, rows in named.items())

    return SuiteResult(
        name=ground.name,
        dataset_hash=ground.dataset_hash,
        too_long=too_long,
        distinct_token_share=distinct_token_share,
        whole=_shown(ground, "all", range(len(ground.challenger))),
        by_category=shown(groups(ground.categories, least=1)),
        by_context=shown(by_context(ground.contexts)),
    )


def _shown(ground: Ground, name: str, rows: Sequence[int]) -> GroupAcceptance:
    ours = _rows(ground.challenger, rows)
    theirs = None if ground.champion is None else _rows(ground.champion, rows)
    return GroupAcceptance(
        group=name,
        conversations=len(ours),
        length=_length(ours) if ours[:, 1].any() else None,
        champion=None if theirs is None or not theirs[:, 1].any() else _length(theirs),
        steps=round(float(ours[:, 1].sum())),
    )


def _rows(side: Sequence[tuple[float, float]], rows: Sequence[int]) -> Rows:
    return np.array(side, dtype=np.float64).reshape(-1, 2)[list(rows)]


def _length(rows: Rows) -> float:
    """Acceptance length; without a complete step nothing was accepted: 1."""
    steps = float(rows[:, 1].sum())
    return float(rows[:, 0].sum() / steps) if steps else 1.0
