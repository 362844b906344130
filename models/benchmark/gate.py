"""Whether a challenger earns promotion: better than no draft and than the champion. Runs in benchmarks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from infra.results import GateDecision
from models.benchmark.acceptance import acceptance_length
from models.benchmark.bootstrap import Difference, paired_difference
from models.benchmark.config import PromotionConfig
from models.decoding.counts import Counts

NO_DRAFT = "no draft"


@dataclass(frozen=True)
class Evidence:
    """What can block a promotion whatever the acceptance length."""

    distinct_token_share: float
    min_distinct_token_share: float
    mismatches: int
    gap: float
    """Relative, between simulated and reference acceptance length."""
    served_gap: float | None = None
    """Relative, between served and simulated acceptance length; None: not served."""

    def objection(self, max_gap: float) -> str | None:
        """The first reason to block, in words."""
        if self.distinct_token_share < self.min_distinct_token_share:
            return (
                f"the target is degenerate: {self.distinct_token_share:.3f} of its tokens are distinct, at least "
                f"{self.min_distinct_token_share:.3f} are needed for acceptance to mean anything"
            )
        if self.mismatches:
            return f"speculative decoding is not lossless: {self.mismatches} mismatches with the target's own text"
        if abs(self.gap) > max_gap:
            return (
                f"simulated and reference acceptance length differ by {abs(self.gap):.1%}, more than {max_gap:.1%}: "
                "the draft does not decode as it was trained"
            )
        if self.served_gap is not None and abs(self.served_gap) > max_gap:
            return (
                f"served and simulated acceptance length differ by {abs(self.served_gap):.1%}, more than "
                f"{max_gap:.1%}: the serving engine does not decode as the draft was trained"
            )
        return None


def decide(
    challenger: Sequence[Counts],
    champion: Sequence[Counts] | None,
    champion_label: str,
    evidence: Evidence,
    promotion: PromotionConfig,
    seed: int = 0,
) -> GateDecision:
    """Judge one lookahead's counts of the same conversations in the same job; `champion` None: there is none yet."""
    sums = _sums(challenger)
    # Without a draft every step emits one token.
    nothing = paired_difference(sums, sums[:, [1, 1]], promotion.resamples, seed)
    judged = [(NO_DRAFT, 1.0, nothing)]
    if champion is not None:
        difference = paired_difference(sums, _sums(champion), promotion.resamples, seed)
        judged.append((champion_label, acceptance_length(champion), difference))
    failed = [entry for entry in judged if entry[2].lower_bound <= promotion.margin]
    against, length, difference = failed[0] if failed else judged[-1]
    objection = evidence.objection(promotion.max_gap)
    return GateDecision(
        passed=objection is None and not failed,
        against=against,
        challenger=acceptance_length(challenger),
        champion=length,
        difference=difference.estimate,
        lower_bound=difference.lower_bound,
        margin=promotion.margin,
        smallest_detectable=difference.smallest_detectable(promotion.margin),
        reason=objection or _reason(against, difference, promotion.margin, passed=not failed),
    )


def _reason(against: str, difference: Difference, margin: float, *, passed: bool) -> str:
    verdict = "exceeds" if passed else "does not exceed"
    return (
        f"against {against}: {difference.estimate:+.1%}, lower bound {difference.lower_bound:+.1%}, which {verdict} "
        f"the margin {margin:.1%}"
    )


def _sums(counts: Sequence[Counts]) -> NDArray[np.int64]:
    return np.array([[count.tokens, count.steps] for count in counts], dtype=np.int64).reshape(-1, 2)
