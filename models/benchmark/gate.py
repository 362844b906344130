"""Whether a challenger earns promotion: better than no draft and than the champion, on every ground.

The decision follows from the evidence alone: `python -m models.benchmark.gate EVIDENCE` prints it again, as JSON.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from infra.processes.exit import run_main
from infra.records.acceptance import CategoryDecision, GateDecision, GateEvidence, Ground, GroundDecision
from infra.records.goodput import GoodputEvidence
from models.benchmark.bootstrap import paired_difference
from models.benchmark.categories import judge_categories

NO_DRAFT = "no draft"


def objection(evidence: GateEvidence) -> str | None:
    """The first reason to block a promotion whatever the acceptance length, in words."""
    if evidence.distinct_token_share < evidence.min_distinct_token_share:
        return (
            f"the target is degenerate: {evidence.distinct_token_share:.3f} of its tokens are distinct, at least "
            f"{evidence.min_distinct_token_share:.3f} are needed for acceptance to mean anything"
        )
    if evidence.mismatches:
        return f"speculative decoding is not lossless: {evidence.mismatches} mismatches with the target's own text"
    if evidence.gap is not None and abs(evidence.gap) > evidence.max_gap:
        return (
            f"simulated and reference acceptance length differ by {abs(evidence.gap):.1%}, more than "
            f"{evidence.max_gap:.1%}: the draft does not decode as it was trained"
        )
    if evidence.served_gap is not None and abs(evidence.served_gap) > evidence.max_gap:
        return (
            f"served and simulated acceptance length differ by {abs(evidence.served_gap):.1%}, more than "
            f"{evidence.max_gap:.1%}: the serving engine does not decode as the draft was trained"
        )
    return _goodput_loss(evidence.goodput, evidence.champion_label) if evidence.goodput else None


def _goodput_loss(goodput: GoodputEvidence, champion_label: str) -> str | None:
    """The load at which the champion is further ahead than is allowed, in words."""
    worst = max(goodput.loads, key=lambda load: load.loss)
    if worst.loss <= goodput.max_loss:
        return None
    assert worst.champion is not None
    return (
        f"goodput falls with {worst.batch} at once: {worst.challenger:.1f} tokens/s at lookahead "
        f"{worst.challenger_lookahead}, {worst.champion:.1f} of {champion_label} at lookahead "
        f"{worst.champion_lookahead}; that is {worst.loss:.1%} less, and promotion.max_goodput_loss allows "
        f"{goodput.max_loss:.1%}"
    )


def decide(evidence: GateEvidence) -> GateDecision:
    """Judge counts of the same conversations in the same job; the first ground that is not passed decides.

    Where all are passed, a category that is worse than the champion still blocks.
    """
    grounds = tuple(_judge(ground, evidence) for ground in evidence.grounds)
    failed = [ground for ground in grounds if not ground.passed]
    deciding = failed[0] if failed else grounds[0]
    blocked = objection(evidence)
    categories = judge_categories(evidence)
    worse = [category for category in categories if category.blocks]
    return GateDecision(
        **deciding.model_dump(exclude={"passed"}),
        passed=blocked is None and not failed and not worse,
        reason=blocked or "; ".join(_reasons(failed, worse, grounds, evidence.category_tolerance)),
        grounds=grounds,
        categories=categories,
    )


def _reasons(
    failed: Sequence[GroundDecision],
    worse: Sequence[CategoryDecision],
    grounds: tuple[GroundDecision, ...],
    tolerance: float,
) -> list[str]:
    """What blocks; or, where nothing does, how every ground was passed."""
    blocks = [
        f"worse than the champion on {category.category} of {category.ground}: {category.difference:+.1%} on "
        f"{category.prompts} prompts, more than {tolerance:.1%} with p = {category.p:.2g} (Holm)"
        for category in worse
    ]
    return [_in_words(ground, grounds) for ground in failed or ([] if blocks else grounds)] + blocks


def _judge(ground: Ground, evidence: GateEvidence) -> GroundDecision:
    challenger = np.array(ground.challenger, dtype=np.int64).reshape(-1, 2)
    # Without a draft every step emits one token.
    rivals = [(NO_DRAFT, challenger[:, [1, 1]])]
    if ground.champion is not None:
        rivals.append((evidence.champion_label, np.array(ground.champion, dtype=np.int64).reshape(-1, 2)))
    judged = [
        (label, rival, paired_difference(challenger, rival, evidence.resamples, evidence.seed))
        for label, rival in rivals
    ]
    failed = [entry for entry in judged if entry[2].lower_bound <= ground.margin]
    against, rival, difference = failed[0] if failed else judged[-1]
    length, other = (float(of[:, 0].sum() / of[:, 1].sum()) for of in (challenger, rival))
    return GroundDecision(
        ground=ground.name,
        passed=not failed,
        against=against,
        challenger=length,
        champion=other,
        difference=difference.estimate,
        lower_bound=difference.lower_bound,
        margin=ground.margin,
        smallest_detectable=difference.smallest_detectable(ground.margin),
    )


def _in_words(judged: GroundDecision, grounds: tuple[GroundDecision, ...]) -> str:
    verdict = "exceeds" if judged.passed else "does not exceed"
    where = f" on {judged.ground}" if len(grounds) > 1 else ""
    return (
        f"against {judged.against}{where}: {judged.difference:+.1%}, lower bound {judged.lower_bound:+.1%}, which "
        f"{verdict} the margin {judged.margin:.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("evidence", type=Path)
    print(decide(GateEvidence.read(parser.parse_args().evidence)).model_dump_json())


if __name__ == "__main__":
    run_main(main)
