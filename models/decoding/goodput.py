"""The cost model and goodput (SmartSpec, arXiv 2406.14066): tokens per second of every lookahead at every load.

From measured step costs and acceptance by position; nothing here runs a model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

import numpy as np
from numpy.typing import NDArray

from infra.records.acceptance import Acceptance
from infra.records.goodput import CostFit, Goodput, GoodputTable, StepTime

TERMS = ("constant", "per_text", "per_token", "per_token_beyond", "several", "several_per_text", "together",
         "per_position")  # fmt: skip
"""Amounts of `CostFit`, in the order of `_terms`."""
PREFERENCE = 1 - 1e-6 * np.arange(len(TERMS))
"""Factors that break ties: of terms with equal columns, as texts and tokens where each text has one token, the first is
chosen."""
ROUNDING = 1e-12
"""Seconds; smaller amounts are 0."""


def fit(measured: Sequence[StepTime]) -> CostFit:
    """The costs, none of them negative, with the least sum of squared relative errors.

    Every total of tokens that was measured is tried as the knee; of equally good ones the earliest is taken.
    """
    # Imported here: every trainer imports this module, for its export, and scipy takes half a second.
    from scipy.optimize import nnls

    seconds = np.array([each.seconds for each in measured])
    best, found = float("inf"), CostFit(**dict.fromkeys(TERMS, 0.0), knee=0.0)
    for knee in sorted({float(each.batch * each.tokens) for each in measured}):
        terms = _terms(measured, knee) / seconds[:, None]
        amounts = nnls(terms * PREFERENCE, np.ones(len(terms)))[0] * PREFERENCE
        amounts[amounts < ROUNDING] = 0
        off = terms @ amounts - 1
        if (error := float(off @ off)) < best * (1 - 1e-6) - 1e-18:
            named = dict(zip(TERMS, amounts.tolist(), strict=True))
            best, found = error, CostFit(**named, knee=knee)
    return found


def _terms(measured: Sequence[StepTime], knee: float) -> NDArray[np.float64]:
    """`[M, 8]`: what each amount is multiplied by."""
    texts, tokens = np.array([(each.batch, each.tokens) for each in measured], dtype=np.float64).T
    total, several, together = texts * tokens, tokens > 1, texts > 1
    beyond = (total - knee).clip(min=0)
    return np.stack([np.ones_like(texts), texts, total, beyond, several, several * texts, together, tokens], axis=1)


@dataclass(frozen=True)
class FittedCosts:
    """Seconds of a verification step, from fits."""

    target: CostFit
    """Costs by verified tokens."""
    draft: CostFit
    """Costs by proposed tokens."""

    def seconds(self, batch: int, lookahead: int) -> float:
        """Time of a step of `batch` texts, drafting included."""
        drafting = self.draft.seconds(batch, lookahead) if lookahead else 0.0
        return self.target.seconds(batch, lookahead + 1) + drafting

    def tree_seconds(self, batch: int, depth: int, topk: int, tokens: int) -> float:
        """Time of a step of `batch` texts with dynamic trees: below the first depth a draft runs `topk` rows of each.

        Choosing places is left out: engines do it in a few small kernels.
        """
        below = self.draft.seconds(batch * topk, depth) - self.draft.seconds(batch * topk, 1)
        return self.target.seconds(batch, tokens + 1) + self.draft.seconds(batch, 1) + below


def rates_of(acceptance: Acceptance) -> tuple[float, ...]:
    """Acceptance by position, up to the last position that was proposed."""
    rates = acceptance.by_position
    known = next((place for place, rate in enumerate(rates) if rate is None), len(rates))
    return tuple(rate for rate in rates[:known] if rate is not None)


def predict(costs: FittedCosts, rates: Sequence[float], batch: int, lookahead: int) -> Goodput:
    """Goodput of `batch` texts that all have this lookahead; of positions beyond `rates` nothing is accepted."""
    emitted = 1.0 + sum(accumulate(rates[:lookahead], mul))
    seconds = costs.seconds(batch, lookahead)
    return Goodput(
        batch=batch,
        lookahead=lookahead,
        step_s=seconds,
        tokens_per_step=emitted,
        tokens_per_s=batch * emitted / seconds,
    )


def goodput_table(
    costs: FittedCosts, rates: Sequence[float], batches: Sequence[int], lookaheads: Sequence[int] | None = None
) -> GoodputTable:
    """Goodput of every batch size and every one of `lookaheads` (default: 0 to the number of `rates`)."""
    chosen = range(len(rates) + 1) if lookaheads is None else lookaheads
    rows = tuple(predict(costs, rates, batch, lookahead) for batch in batches for lookahead in chosen)
    return GoodputTable(rates=tuple(rates), target=costs.target, draft=costs.draft, rows=rows)
