"""Whether a challenger earns promotion: better than no draft, prompt lookup and the champion, on every ground.

The decision follows from the evidence alone: `python -m models.benchmark.gate EVIDENCE` prints it again, as JSON.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from infra.processes.exit import run_main
from infra.quantities import plural, signed
from infra.records.acceptance import (
    UNTRAINED,
    CategoryDecision,
    GateDecision,
    GateEvidence,
    Ground,
    GroundAtLoad,
    GroundDecision,
    Rows,
    SideAtLoad,
)
from infra.records.goodput import GoodputEvidence
from models.benchmark.categories import judge_categories
from models.benchmark.paired import Difference, paired_difference

NO_DRAFT, PROMPT_LOOKUP = UNTRAINED


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
    duels = [duel for ground in evidence.grounds for duel in _duels(ground, evidence)]
    grounds = tuple(_judge(ground, [duel for duel in duels if duel.ground is ground]) for ground in evidence.grounds)
    failed = [ground for ground in grounds if not ground.passed]
    deciding = failed[0] if failed else grounds[0]
    blocked = objection(evidence)
    categories = judge_categories(evidence)
    worse = [category for category in categories if category.blocks]
    instead, arguments = _instead(duels)
    reasons = _reasons(failed, worse, grounds, evidence.category_tolerance)
    if instead and not blocked:
        how = f"with {instead}, which needs no training: the server arguments `{' '.join(arguments)}`"
        reasons.append(f"serve {how if arguments else 'without a draft'}")
    reasons += [evidence.caveat] if evidence.caveat else []
    return GateDecision(
        **deciding.model_dump(exclude={"passed"}),
        passed=blocked is None and not failed and not worse,
        reason=blocked or "; ".join(reasons),
        grounds=grounds,
        categories=categories,
        instead=None if blocked else instead,
        instead_arguments=() if blocked else arguments,
        unproven=not blocked and not worse and bool(failed) and all(duel.difference.estimate > 0 for duel in duels),
    )


def _reasons(
    failed: Sequence[GroundDecision],
    worse: Sequence[CategoryDecision],
    grounds: tuple[GroundDecision, ...],
    tolerance: float,
) -> list[str]:
    """What blocks; or, where nothing does, how every ground was passed."""
    blocks = [
        f"worse than the champion on {category.category} of {category.ground}: {signed(category.difference)} on "
        f"{category.prompts} prompts, more than {tolerance:.1%} with p = {category.p:.2g} (Holm)"
        for category in worse
    ]
    return [_in_words(ground, grounds) for ground in failed or ([] if blocks else grounds)] + blocks


@dataclass(frozen=True)
class Duel:
    """The challenger against one rival on one ground, at one load or by tokens per step."""

    ground: Ground
    load: int | None
    against: str
    challenger: SideAtLoad
    rival: SideAtLoad

    @property
    def difference(self) -> Difference:
        cost = self.challenger.step_s / self.rival.step_s
        return paired_difference(_array(self.challenger.rows), _array(self.rival.rows), cost)

    @property
    def passed(self) -> bool:
        return self.difference.lower_bound > self.ground.margin

    def rate(self, side: SideAtLoad) -> float:
        """Tokens per second of all texts; without a load, tokens per step."""
        tokens, steps = _array(side.rows).sum(axis=0)
        return float((self.load or 1) * tokens / steps / side.step_s) if steps else 1 / side.step_s


def _duels(ground: Ground, evidence: GateEvidence) -> Iterator[Duel]:
    """Loads in order; at each, what needs no training comes first."""
    for load in ground.loads or [_by_step(ground, evidence.lookahead)]:
        plain = SideAtLoad(
            lookahead=0, step_s=load.plain_step_s, rows=tuple((steps, steps) for _, steps in load.challenger.rows)
        )
        rivals = {NO_DRAFT: plain, PROMPT_LOOKUP: load.prompt_lookup, evidence.champion_label: load.champion}
        for against, rival in rivals.items():
            if rival is not None:
                yield Duel(ground, load.batch if ground.loads else None, against, load.challenger, rival)


def _by_step(ground: Ground, lookahead: int) -> GroundAtLoad:
    """All at the benchmark's lookahead, where every step counts alike."""

    def side(rows: Rows | None) -> SideAtLoad | None:
        return None if rows is None else SideAtLoad(lookahead=lookahead, step_s=1.0, rows=rows)

    challenger = side(ground.challenger)
    assert challenger is not None
    return GroundAtLoad(
        batch=1, plain_step_s=1.0, challenger=challenger, champion=side(ground.champion),
        prompt_lookup=side(ground.prompt_lookup),
    )  # fmt: skip


def _judge(ground: Ground, duels: Sequence[Duel]) -> GroundDecision:
    """By the first rival that is not beaten; where all are, by the one that came closest."""
    closest = min(duels, key=lambda duel: duel.difference.lower_bound)
    decided = next((duel for duel in duels if not duel.passed), closest)
    difference = decided.difference
    return GroundDecision(
        ground=ground.name,
        passed=decided.passed,
        against=decided.against,
        load=decided.load,
        challenger=decided.rate(decided.challenger),
        champion=decided.rate(decided.rival),
        difference=difference.estimate,
        lower_bound=difference.lower_bound,
        margin=ground.margin,
        smallest_detectable=difference.smallest_detectable(ground.margin),
        prompts_needed=None if decided.passed else difference.prompts_needed(ground.margin),
    )


def _instead(duels: Sequence[Duel]) -> tuple[str | None, tuple[str, ...]]:
    """What to serve with where a method without training is not beaten, and SGLang's arguments for it.

    Of the methods without training the fastest there. None where a champion is faster still, which then goes on, or
    the challenger, whose prompts were too few to prove it.
    """
    lost = next((duel for duel in duels if duel.against in UNTRAINED and not duel.passed), None)
    if lost is None:
        return None, ()
    rivals = {
        duel.against: duel for duel in duels if (duel.ground, duel.load) == (lost.ground, lost.load)
    }  # fmt: skip
    rates = {against: duel.rate(duel.rival) for against, duel in rivals.items()}
    lookup, margin = rates.get(PROMPT_LOOKUP, 0.0), max(lost.ground.margin, 0.0)
    best = PROMPT_LOOKUP if lookup > (1 + margin) * rates[NO_DRAFT] else NO_DRAFT
    trained = [rate for against, rate in rates.items() if against not in UNTRAINED]
    if max([lost.rate(lost.challenger), *trained]) > rates[best]:
        return None, ()
    return best, sglang_ngram(rivals[best].rival.lookahead) if best == PROMPT_LOOKUP else ()


def sglang_ngram(lookahead: int) -> tuple[str, ...]:
    """SGLang's arguments for prompt lookup by chains; its number of draft tokens includes the last emitted one."""
    return (
        "--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(lookahead + 1),
        "--speculative-ngram-max-bfs-breadth", "1",
    )  # fmt: skip


def _array(rows: Rows) -> NDArray[np.float64]:
    return np.array(rows, dtype=np.float64).reshape(-1, 2)


def _in_words(judged: GroundDecision, grounds: tuple[GroundDecision, ...]) -> str:
    verdict = "exceeds" if judged.passed else "does not exceed"
    where = f" on {judged.ground}" if len(grounds) > 1 else ""
    what = "tokens per step" if judged.load is None else f"tokens/s with {plural(judged.load, 'text')} at once"
    return (
        f"against {judged.against}{where}, in {what}: {signed(judged.difference)}, lower bound "
        f"{signed(judged.lower_bound)}, which {verdict} the margin {judged.margin:.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("evidence", type=Path)
    print(decide(GateEvidence.read(parser.parse_args().evidence)).model_dump_json())


if __name__ == "__main__":
    run_main(main)
