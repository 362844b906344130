"""Three sentences about a run: how good the draft is, compared with what, and what happens next."""

from infra.quantities import signed
from infra.records.acceptance import BenchmarkResult, GateDecision, RegisteredDraft
from infra.records.benchmark_text import tokens_per_s
from infra.tracking.registry import CHALLENGER, CHAMPION, REFUSED, SMOKE_TEST

NO_DRAFT = "no draft"


def meaning(target: str, result: BenchmarkResult, draft: RegisteredDraft) -> tuple[str, str, str]:
    """Exactly three sentences for somebody who was not there."""
    return how_good(target, result), compared(result), what_next(result.gate, draft)


def how_good(target: str, result: BenchmarkResult) -> str:
    """The acceptance length, and what decoding gained from it."""
    at = result.conditions.lookahead
    return (
        f"On {result.conditions.prompts} held-out prompts the draft lets {target} emit "
        f"{result.simulated.length[at]:.2f} tokens per verification step at lookahead {at} (1.00 would mean that "
        f"nothing it proposes is accepted), and {_speed(result)}."
    )


def _speed(result: BenchmarkResult) -> str:
    speed = result.speed
    if speed.speedup is None:
        return f"no speed-up is published, because the timing was implausible ({speed.note.rstrip('.')})"
    fast, slow = tokens_per_s(speed.speculative_tokens_per_s), tokens_per_s(speed.plain_tokens_per_s)
    how = f"{fast} instead of {slow} tokens per second"
    if speed.speedup < 1:
        return f"decoding at batch 1 became slower with it, {how}"
    return f"decoding at batch 1 was {speed.speedup:.2f} times as fast with it, {how}"


def compared(result: BenchmarkResult) -> str:
    """What needs no training first (it costs nothing), then the draft that was in service."""
    at = result.conditions.lookahead
    reached = {name: f"{name} ({of.length[at]:.2f})" for name, of in result.baselines.items()}
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
    words = f"against the draft in service, which reaches {champion:.2f}, the difference is {signed(difference)}"
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
