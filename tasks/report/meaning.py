"""What a run came to, in words: the answer, how good the draft is, compared with what, and what happens next."""

from infra.quantities import plural, signed
from infra.records.acceptance import UNTRAINED, BenchmarkResult, GateDecision, RegisteredDraft
from infra.records.benchmark_text import against_baselines, text_of, tokens_per_s
from infra.records.data_path import TargetRecord
from infra.tracking.registry import CHALLENGER, CHAMPION, REFUSED, REPLACES, SMOKE_TEST

NO_DRAFT = UNTRAINED[0]
UNSERVED = "although no serving engine reads this draft: Draftsmith's own decoder alone does"


def meaning(
    target: TargetRecord, result: BenchmarkResult, draft: RegisteredDraft, is_served: bool = True
) -> tuple[str, str, str]:
    """Exactly three sentences for somebody who was not there; `is_served`: some serving engine reads the draft."""
    return how_good(target, result), compared(result), what_next(result.gate, draft, is_served)


def answer(result: BenchmarkResult) -> str:
    """How much faster, at which load, than what, and how sure."""
    gate = result.gate
    what = "tokens per verification step" if gate.load is None else "tokens per second"
    load = "" if gate.load is None else f" with {plural(gate.load, 'text')} at once"
    where = f" on {gate.ground}" if len(gate.grounds) > 1 else ""
    figures = (
        f"{gate.challenger / gate.champion:.2f} times the {what} of {gate.against}{load}, on {text_of(result)}{where}"
    )
    sure = f"at least {1 + gate.lower_bound:.2f} times with 97.5% confidence"
    if gate.passed:
        return f"Better than every rival: {figures}; {sure}{_slower(result)}."
    if gate.instead:
        how = f" (`{' '.join(gate.instead_arguments)}`)" if gate.instead_arguments else ""
        other = "without a draft" if gate.instead == NO_DRAFT else f"with {gate.instead} instead{how}"
        return f"Serve {other}: the draft gives {figures}; {sure}."
    if gate.lower_bound > gate.margin:
        return f"Not promoted: {gate.reason.rstrip('.')}."
    return f"Not promoted: {figures}; {sure}, and more than {1 + gate.margin:g} times is needed."


def _slower(result: BenchmarkResult) -> str:
    """Where tokens per step decided, whether the target alone is predicted to be faster."""
    goodput = result.goodput
    if result.gate.load is not None or goodput is None or goodput.best.lookahead:
        return ""
    return f". But with {plural(goodput.main_load, 'text')} at once the target alone is predicted to be faster"


def how_good(target: TargetRecord, result: BenchmarkResult) -> str:
    """The acceptance length, and what decoding gained from it."""
    at, speed = result.conditions.lookahead, result.speed
    if speed.speedup is None:
        gain = f"no speed-up is published, because the timing was implausible ({speed.note.rstrip('.')})"
    else:
        faster = f"was {speed.speedup:.2f} times as fast" if speed.speedup >= 1 else "became slower"
        gain = (
            f"greedy decoding at batch 1 {faster} with it, {tokens_per_s(speed.speculative_tokens_per_s)} instead of "
            f"{tokens_per_s(speed.plain_tokens_per_s)} tokens per second"
        )
    blind = "; it saw text only, and its proposals after an image may be worse" if target.text_only else ""
    return (
        f"Over {text_of(result)} of {result.conditions.prompts} held-out prompts, the draft lets {target.name} emit "
        f"{result.length:.2f} tokens per verification step at lookahead {at} (1.00 would mean that nothing it proposes "
        f"is accepted), and {gain}{blind}."
    )


def compared(result: BenchmarkResult) -> str:
    """The baselines, which need no training, first, then the draft that was in service."""
    at, gate = result.conditions.lookahead, result.gate
    needs = "needs" if len(result.baselines_on(result.traffic)) == 1 else "need"
    text = f"It {against_baselines(result)}, which {needs} no training, on the same texts"
    if gate.instead:
        better = "decoding without a draft" if gate.instead == NO_DRAFT else gate.instead
        text += f", and for this traffic {better} is the better choice"
    served = result.champion_on(result.traffic)
    if served is None:
        return f"{text}; there was no draft in service to compare it with."
    own = at if at in served.length else max(served.length)
    champion, where = served.length[own], "" if own == at else f" at lookahead {own}"
    difference = signed(result.length / champion - 1)
    text += f"; against the draft in service, which reaches {champion:.2f}{where}, the difference is {difference}"
    return (
        f"{text}."
        if gate.against in UNTRAINED
        else f"{text} (the gate: at least {signed(gate.lower_bound)} with 97.5% confidence)."
    )


def what_next(gate: GateDecision, draft: RegisteredDraft, is_served: bool = True) -> str:
    """Who serves now, and what a person can do about it."""
    version, tags = f"version {draft.version} of {draft.name}", draft.tags
    promote = f"`draftsmith drafts promote {draft.version} --name {draft.name}`"
    if not gate.passed:
        state = "waits as the challenger" if draft.aliases else "is registered and does not serve"
        if CHAMPION in draft.aliases:
            state = "is the champion only because somebody promoted it"
        goes_on = " A run with training.start_from=furthest goes on from it." if gate.unproven and draft.aliases else ""
        return (
            f"The gate is not passed ({gate.reason.rstrip('.')}), so {version} {state}, until a better one comes or "
            f"somebody runs {promote}.{goes_on}"
        )
    if CHAMPION in draft.aliases:
        undo = f"; `draftsmith drafts rollback --name {draft.name}` puts version {tags.get(REPLACES)} back"
        role = "the draft that serving takes from now on" if is_served else UNSERVED
        then = f"is the champion, {role}{undo if tags.get(REPLACES) else ''}"
        return f"The gate is passed, so {version} {then}."
    if REFUSED in tags:
        return f"The gate is passed, but {version} is not promoted: {tags[REFUSED].rstrip('.')}."
    if CHALLENGER in draft.aliases:
        return (
            f"The gate is passed, and {version} waits for approval: choose Resume in the run of `promote` in Prefect's "
            f"UI, or run {promote}."
        )
    if tags.get(SMOKE_TEST, "").startswith("failed"):
        return (
            f"The gate is passed, but {version} does not serve: loaded from the registry it did not decode as it was "
            f"benchmarked ({tags[SMOKE_TEST].removeprefix('failed: ').rstrip('.')})."
        )
    return (
        f"The gate is passed, but somebody has moved the aliases since, so {version} is registered and does not serve."
    )
