"""Acceptance by category and by the length of the prompt, and the categories that block a challenger."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtr, stdtrit

from infra.records.acceptance import CategoryDecision, GateEvidence, Ground, GroupAcceptance, SuiteResult
from models.benchmark.bootstrap import Z_POWER, resampled

LEAST_PROMPTS = 20
"""Minimum number of prompts of a category that is judged separately."""
LEVEL = 0.05
CONTEXT_BOUNDS = (128, 512, 2048, 8192)
"""Prompt tokens, each the largest of its range."""

Rows = NDArray[np.int64]
"""`[N, 2]` tokens and complete verification steps of each conversation."""


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


@dataclass(frozen=True)
class Worsening:
    """Whether a challenger is worse than the champion by more than a tolerance."""

    p: float
    """One-sided, of "by no more"."""
    smallest_detectable: float
    """The worsening, relative, that this test finds with a power of 80 %."""


def worsening(challenger: Rows, champion: Rows, tolerance: float, resamples: int, seed: int) -> Worsening:
    """Student's t of the logarithm of the ratio, its standard error by the paired bootstrap over conversations.

    Shares of resamples, the percentile method, err too often in the far tail that Holm asks for: of six categories of
    20 conversations without a difference one blocked in 7.6 % of decisions, by this rule in 4.6 to 5.7 %. The logarithm
    takes the skew away; resamples of n conversations vary by sqrt((n - 1) / n) too little (Efron & Tibshirani, ch. 5).
    """
    number = len(challenger)
    # A resample without a step says -1: as bad as a thousandth.
    logs = np.log(np.maximum(1 + resampled(challenger, champion, resamples, seed), 1e-3))
    error = max(float(logs.std(ddof=1)) * (number / (number - 1)) ** 0.5, 1e-12)
    allowed = float(np.log1p(-tolerance))
    found = float(np.log(_length(challenger) / _length(champion)))
    reach = float(stdtrit(number - 1, 1 - LEVEL)) + Z_POWER
    return Worsening(float(stdtr(number - 1, (found - allowed) / error)), float(-np.expm1(allowed - reach * error)))


def _compare(ground: Ground, name: str, rows: Sequence[int], evidence: GateEvidence) -> CategoryDecision:
    """The decision before p-values are adjusted."""
    ours, theirs = (_rows(side, rows) for side in (ground.challenger, ground.champion or ()))
    judged = len(ours) >= LEAST_PROMPTS and min(ours[:, 1].sum(), theirs[:, 1].sum()) > 0
    found = worsening(ours, theirs, evidence.category_tolerance, evidence.resamples, evidence.seed) if judged else None
    first, second = _length(ours), _length(theirs)
    return CategoryDecision(
        ground=ground.name,
        category=name,
        prompts=len(ours),
        challenger=first,
        champion=second,
        difference=first / second - 1,
        p=found and found.p,
        smallest_detectable=found and found.smallest_detectable,
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
        steps=int(ours[:, 1].sum()),
    )


def _rows(side: Sequence[tuple[int, int]], rows: Sequence[int]) -> Rows:
    return np.array(side, dtype=np.int64).reshape(-1, 2)[list(rows)]


def _length(rows: Rows) -> float:
    """Acceptance length; without a complete step nothing was accepted: 1."""
    steps = int(rows[:, 1].sum())
    return float(rows[:, 0].sum() / steps) if steps else 1.0
