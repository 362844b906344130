"""Three sentences about a run: how good the draft is, compared with what, and what happens next."""

from infra.records.acceptance import BenchmarkResult, GateDecision, RegisteredDraft
from infra.tracking.registry import CHALLENGER, CHAMPION, REFUSED, SMOKE_TEST
from tasks.report.facts import length, rate, share, signed

NO_DRAFT = "no draft"


def meaning(target: str, result: BenchmarkResult, draft: RegisteredDraft) -> tuple[str, str, str]:
    """Exactly three sentences for somebody who was not there."""
    return how_good(target, result), compared(result), what_next(result.gate, draft)


def how_good(target: str, result: BenchmarkResult) -> str:
    """The acceptance length, and what decoding gained from it."""
    at = result.conditions.lookahead
    return (
        f"On {result.conditions.prompts} held-out prompts the draft lets {target} emit "
        f"{length(result.simulated.length[at])} tokens per verification step at lookahead {at} (1.00 would mean that "
        f"nothing it proposes is accepted), and {_speed(result)}."
    )


def _speed(result: BenchmarkResult) -> str:
    speed = result.speed
    if speed.speedup is None:
        return f"no speed-up is published, because the timing was implausible ({speed.note.rstrip('.')})"
    how = f"{rate(speed.speculative_tokens_per_s)} instead of {rate(speed.plain_tokens_per_s)} tokens per second"
    if speed.speedup < 1:
        return f"decoding at batch 1 became slower with it, {how}"
    return f"decoding at batch 1 was {speed.speedup:.2f} times as fast with it, {how}"


def compared(result: BenchmarkResult) -> str:
    """What needs no training first (it costs nothing), then the draft that was in service."""
    at = result.conditions.lookahead
    reached = {name: f"{name} ({length(of.length[at])})" for name, of in result.baselines.items()}
    beaten = [reached[name] for name in reached if name not in result.unbeaten]
    said = [f"It beats {' and '.join(beaten)}"] if beaten else []
    if result.unbeaten:
        words = " or ".join(reached[name] for name in result.unbeaten)
        said.append(f"{'does' if beaten else 'It does'} not beat {words}")
    baseline = f"{', but '.join(said)}, which need{'s' if len(reached) == 1 else ''} no training, on the same texts"
    if result.unbeaten:
        best = max(result.unbeaten, key=lambda name: result.baselines[name].length[at])
        baseline += f", so on texts like these {best} is the better choice"
    return f"{baseline}; {_against(result)}."


def _against(result: BenchmarkResult) -> str:
    gate, at = result.gate, result.conditions.lookahead
    if result.champion is None:
        return "there was no draft in service to compare it with"
    champion = result.champion.length[at]
    difference = result.simulated.length[at] / champion - 1
    words = f"against the draft in service, which reaches {length(champion)}, the difference is {signed(difference)}"
    if gate.against == NO_DRAFT:
        return words
    return f"{words} (at least {signed(gate.lower_bound)} with 97.5 % confidence)"


def what_next(gate: GateDecision, draft: RegisteredDraft) -> str:
    """Who serves now, and what a person can do about it."""
    version = f"version {draft.version} of {draft.name}"
    if not gate.passed:
        return (
            f"The gate is not passed ({gate.reason.rstrip('.')}), so {version} "
            f"{_stays(draft)}, until a better one comes or somebody runs `draftsmith drafts promote {draft.version} "
            f"--name {draft.name}`"
        ) + "."
    if REFUSED in draft.tags and CHAMPION not in draft.aliases:
        return f"The gate is passed, but {version} is not promoted: {draft.tags[REFUSED].rstrip('.')}."
    if CHALLENGER in draft.aliases:
        return (
            f"The gate is passed, and {version} waits for approval: choose Resume in the run of `promote` in Prefect's "
            f"UI, or run `draftsmith drafts promote {draft.version} --name {draft.name}`."
        )
    if draft.tags.get(SMOKE_TEST, "").startswith("failed"):
        return (
            f"The gate is passed, but {version} does not serve: loaded from the registry it did not decode as it was "
            f"benchmarked ({draft.tags[SMOKE_TEST].removeprefix('failed: ').rstrip('.')})."
        )
    if CHAMPION not in draft.aliases:
        return (
            f"The gate is passed, but somebody has moved the aliases since, so {version} is registered and does not "
            "serve."
        )
    back = draft.tags.get("replaces")
    undo = f"; `draftsmith drafts rollback --name {draft.name}` puts version {back} back" if back else ""
    return f"The gate is passed, so {version} is the champion, the draft that serving takes from now on{undo}."


def _stays(draft: RegisteredDraft) -> str:
    if CHAMPION in draft.aliases:
        return "is the champion only because somebody promoted it"
    return "waits as the challenger" if draft.aliases else "is registered and does not serve"


def gate_line(gate: GateDecision) -> str:
    """The gate's decision with its figures."""
    return (
        f"gate {'passed' if gate.passed else 'not passed'} ({gate.reason.rstrip('.')}); the smallest difference that "
        f"these prompts can show is {share(gate.smallest_detectable)}{_by_category(gate)}"
    )


def _by_category(gate: GateDecision) -> str:
    """Every category against the champion, and what its prompts could have shown."""
    said = [
        f"{each.category} of {each.ground} {signed(each.difference)} "
        + (
            "(too few prompts to judge)"
            if each.p is None or each.smallest_detectable is None
            else f"(p = {each.p:.2g}, a worsening by {share(each.smallest_detectable)} would show)"
        )
        for each in gate.categories
    ]
    return f"; by category: {', '.join(said)}" if said else ""


def lossless_line(result: BenchmarkResult) -> str:
    """Whether speculative decoding changed the text."""
    lossless = result.lossless
    differ = f"{_of(lossless.mismatches, 'mismatch', 'mismatches')} and {_of(lossless.ties, 'tie', 'ties')}"
    if lossless.mismatches:
        return f"NOT lossless: {differ} in {lossless.tokens:,} tokens compared with the target's own text"
    return f"lossless: {lossless.tokens:,} tokens equal the target's own text, with {differ}"


def serving_line(result: BenchmarkResult) -> str | None:
    """The main load's goodput in one sentence; None if not measured."""
    found = result.goodput
    if found is None:
        return None
    best, loads = found.best, f"{found.main_load} text{'s' if found.main_load > 1 else ''} at once"
    gain = best.tokens_per_s / found.draft.plain_at(found.main_load).tokens_per_s
    advice = (
        f"propose {best.lookahead} tokens ({gain:.2f} times the target alone)" if best.lookahead else "propose none"
    )
    served = result.served
    measured = f"; the engine's own figures are of lookahead {served.lookahead}" if served and served.acceptance else ""
    return f"predicted from step costs on {found.hardware}, in transformers: with {loads} {advice}{measured}"


def _of(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def agreement_line(result: BenchmarkResult) -> str:
    """Whether simulated acceptance is what real decoding accepts."""
    same = "identical" if result.counts_identical else "NOT identical"
    served = f"; {result.served.summary}" if result.served else ""
    return (
        f"simulated and really decoded counts are {same} step by step in {result.counts_compared} conversations, their "
        f"acceptance lengths differ by {share(abs(result.gap))}{served}"
    )
