"""A benchmark for people: the tables and findings that terminal, report, MLflow and model card show alike."""

from infra.quantities import enumerated, figure, plural, signed
from infra.records.acceptance import (
    Acceptance,
    BenchmarkResult,
    CategoryDecision,
    Conditions,
    GroupAcceptance,
    SuiteResult,
)


def sampling(conditions: Conditions) -> str:
    """How the sampled texts were drawn: temperature, and what of top-k and top-p leaves something out."""
    top_k = f", top-k {conditions.sampled_top_k}" if conditions.sampled_top_k else ""
    top_p = f", top-p {conditions.sampled_top_p:g}" if conditions.sampled_top_p < 1 else ""
    return f"temperature {conditions.sampled_temperature:g}{top_k}{top_p}"


def key(name: str) -> str:
    """The name of a baseline in reports for programs, and of its metrics."""
    return name.lower().replace(", ", "_").replace(" ", "_")


def text_of(result: BenchmarkResult, traffic: str | None = None) -> str:
    """What the `greedy` or `sampled` texts are; by default those that the gate judges."""
    is_greedy = (traffic or result.traffic) == "greedy"
    return "greedy text" if is_greedy else f"text sampled at {sampling(result.conditions)}"


def sources_on(result: BenchmarkResult, traffic: str) -> dict[str, Acceptance]:
    """Every source of proposals that was measured on `greedy` or `sampled` text, the draft first."""
    of, rule = result, result.conditions.proposals
    ours: dict[str, Acceptance | None]
    if traffic == "greedy":
        ours = {
            "draft, simulated" if of.reference else f"draft, counted by {of.conditions.engine}": of.acceptance,
            "draft, real decoding": of.reference,
            "draft, served": of.served and of.reference and of.served.acceptance,
        }
    else:
        rules = {"drawn": of.sampled_drawn, "greedy": of.sampled}
        first, second = sorted(rules, key=lambda name: name != rule)
        ours = {
            f"draft, {first} proposals": rules[first],
            f"draft, {second} proposals": rules[second],
        }
    measured = {**ours, "champion": of.champion_on(traffic), **of.baselines_on(traffic)}
    return {name: acceptance for name, acceptance in measured.items() if acceptance}


def sources(result: BenchmarkResult) -> dict[str, Acceptance]:
    """Every source of proposals on both kinds of text, in names that tell them apart."""
    sampled = {f"{name}, {sampling(result.conditions)}": of for name, of in sources_on(result, "sampled").items()}
    return {**sources_on(result, "greedy"), **sampled}


def acceptance_tables(result: BenchmarkResult) -> dict[str, list[dict[str, str]]]:
    """Acceptance length by lookahead and number of steps: a table for each kind of text, what the gate judges first.

    One row for each source, one column for each lookahead; empty where not measured.
    """
    at, columns, tables = result.conditions.lookahead, shown_lookaheads(result), {}
    for traffic in sorted(("greedy", "sampled"), key=lambda name: name != result.traffic):
        rows = [
            {"acceptance length by lookahead": _with_texts(name, of, result.conditions)}
            | {str(one): f"{of.length[one]:.2f}" if one in of.length else "" for one in columns}
            | {"steps": f"{of.steps[at if at in of.steps else max(of.steps)]:,}"}
            for name, of in sources_on(result, traffic).items()
        ]
        if rows:
            text = text_of(result, traffic)
            tables[text[0].upper() + text[1:]] = rows
    return tables


def shown_lookaheads(result: BenchmarkResult) -> list[int]:
    """The draft's lookaheads, and that of a source which was measured at none of them: in the serving engine a champion
    of another method may have one of its own."""
    own = set(result.acceptance.length)
    return sorted(own.union(*(of.length for of in sources(result).values() if own.isdisjoint(of.length))))


def _with_texts(name: str, of: Acceptance, conditions: Conditions) -> str:
    """The source, and how many texts it was measured on where that is not all of them."""
    return name if of.conversations == conditions.prompts else f"{name} ({plural(of.conversations, 'text')})"


def goodput_rows(result: BenchmarkResult) -> list[dict[str, str]]:
    """The best lookahead and its predicted goodput at each load; empty if not measured."""
    rows, measured = [], result.goodput
    if measured is None:
        return []
    trees = {tree.batch: tree for tree in measured.trees}
    for load in measured.by_load:
        plain = measured.draft.plain_at(load.batch).tokens_per_s
        row = {
            "texts at once": str(load.batch),
            "best lookahead": str(load.challenger_lookahead),
            "tokens/s": figure(load.challenger),
            "target alone": figure(plain),
            "gain": signed(load.challenger / plain - 1),
        }
        if load.prompt_lookup is not None:
            row |= {"prompt lookup": figure(load.prompt_lookup)}
        if load.champion is not None:
            row |= {"champion": figure(load.champion), "its lookahead": str(load.champion_lookahead)}
        if trees:
            tree = trees.get(load.batch)
            shape = tree and f"{tree.depth} deep, top-k {tree.topk}, {plural(tree.tokens, 'token')}"
            row |= {"best tree": shape or "", "its tokens/s": figure(tree.tokens_per_s) if tree else ""}
        rows.append(row)
    return rows


def against_baselines(result: BenchmarkResult) -> str:
    """Which baselines the draft beats on the traffic's text, and which not, each with its acceptance length."""
    at = result.conditions.lookahead
    reached = {name: f"{name} ({of.length[at]:.2f})" for name, of in result.baselines_on(result.traffic).items()}
    beaten = [text for name, text in reached.items() if name not in result.unbeaten]
    verdicts = [f"beats {enumerated(beaten, 'and')}"] if beaten else []
    if result.unbeaten:
        verdicts.append(f"does not beat {enumerated([reached[name] for name in result.unbeaten], 'or')}")
    return ", but ".join(verdicts)


def summary(result: BenchmarkResult) -> str:
    """The draft against the baselines, on the traffic's text first, and why prompt lookup is strong where it is."""
    at, other = result.conditions.lookahead, "sampled" if result.traffic == "greedy" else "greedy"
    text = (
        f"the draft {against_baselines(result)} on {text_of(result)}: {result.length:.2f} tokens per verification step "
        f"at lookahead {at}"
    )
    elsewhere = result.draft_on(other)
    if elsewhere is None or not (rivals := result.baselines_on(other)):
        return f"{text}, counted by {result.conditions.engine}"
    others = enumerated([f"{of.length[at]:.2f}" for of in rivals.values()], "and")
    text += f"; on {text_of(result, other)} {elsewhere.length[at]:.2f} against {others}"
    greedy, sampled = result.target_distinct_token_share, result.sampled_distinct_token_share or 0.0
    lookup, drawn = result.prompt_lookup.length[at], result.prompt_lookup_sampled
    easier = drawn is not None and drawn.length[at] < lookup
    if lookup >= result.acceptance.length[at] and greedy < sampled and easier:
        text += (
            f" (the target's greedy text repeats itself: distinct-token share {greedy:.2f}, {sampled:.2f} when sampled)"
        )
    return text


def findings(result: BenchmarkResult) -> dict[str, str]:
    """What the tables do not show, by topic."""
    found = {
        "Gate": _gate(result),
        "Lossless": _lossless(result),
        "Simulated = decoded": _agreement(result),
        "Served": result.served and result.served.summary.removeprefix("served: "),
        "Goodput": _goodput(result),
        "Confidences": _confidences(result),
        "Speed": _speed(result),
        "Target's text": _distinct_tokens(result),
        "Sampled proposals": _sampled_proposals(result),
    }
    return {topic: text for topic, text in found.items() if text}


def _gate(result: BenchmarkResult) -> str:
    gate = result.gate
    categories = f"; by category: {', '.join(map(_category, gate.categories))}" if gate.categories else ""
    needed = f", and would show this one if they were {gate.prompts_needed:,}" if gate.prompts_needed else ""
    power = f"these prompts show a difference of {gate.smallest_detectable:.1%} in four of five cases{needed}"
    if gate.smallest_detectable < gate.margin + 1e-9:  # no spread
        power = "all prompts gave the same ratio, so they do not tell how much others would differ"
    return f"{'passed' if gate.passed else 'not passed'} ({gate.reason.rstrip('.')}); {power}{categories}"


def _category(each: CategoryDecision) -> str:
    """A category against the champion, and what its prompts could have shown."""
    power = (
        "too few prompts to judge"
        if each.p is None or each.smallest_detectable is None
        else f"p = {each.p:.2g} by Holm, a worsening by {each.smallest_detectable:.1%} would show"
    )
    blocks = ", BLOCKS" if each.blocks else ""
    on = plural(each.prompts, "prompt")
    return f"{each.category} of {each.ground} {signed(each.difference)} on {on} ({power}{blocks})"


def _lossless(result: BenchmarkResult) -> str:
    lossless = result.lossless
    mismatches = "1 mismatch" if lossless.mismatches == 1 else f"{lossless.mismatches:,} mismatches"
    differ = f"{mismatches} and {plural(lossless.ties, 'tie')}"
    if lossless.mismatches:
        return f"NO, {differ} in {lossless.tokens:,} tokens compared with the target's own text"
    return f"yes, {lossless.tokens:,} tokens equal the target's own text, with {differ}"


def _distinct_tokens(result: BenchmarkResult) -> str:
    sampled = result.sampled_distinct_token_share
    when_sampled = "" if sampled is None else f", {sampled:.1%} when sampled"
    return (
        f"{result.target_distinct_token_share:.1%} distinct tokens (within 128) when greedy{when_sampled}: the "
        "fewer, the better prompt lookup does"
    )


def _agreement(result: BenchmarkResult) -> str | None:
    if result.gap is None:
        return None
    same = "identical" if result.counts_identical else "NOT identical"
    return (
        f"counts are {same} step by step in {plural(result.counts_compared, 'conversation')}, acceptance lengths "
        f"differ by {abs(result.gap):.1%}"
    )


def _goodput(result: BenchmarkResult) -> str | None:
    """The main load's goodput."""
    measured = result.goodput
    if measured is None:
        return None
    best = measured.best
    gain = best.tokens_per_s / measured.draft.plain_at(measured.main_load).tokens_per_s
    advice = (
        f"propose {plural(best.lookahead, 'token')} ({gain:.2f} times the target alone)"
        if best.lookahead
        else ("propose none")
    )
    served = result.served
    engine = f"; the engine's own figures are of lookahead {served.lookahead}" if served and served.acceptance else ""
    return (
        f"predicted from step costs on {measured.hardware}, in transformers: with "
        f"{plural(measured.main_load, 'text')} at once {advice}{engine}"
    )


def _confidences(result: BenchmarkResult) -> str | None:
    """Whether the draft's confidences say how often proposals are accepted."""
    fit = result.goodput and result.goodput.confidence
    if not fit:
        return None
    by_chance = (
        f", after which exact ones seem wrong by {max(fit.errors_by_chance):.1%}" if fit.errors_by_chance else ""
    )
    text = (
        f"wrong by {max(fit.errors_after):.1%} at the worst position after fitting a temperature to each "
        f"({plural(fit.steps, 'step')}{by_chance})"
    )
    if fit.meaningful:
        return f"{text}; SGLang's tables for scheduled verification are in the export"
    return (
        f"{text}, so scheduled verification is not offered: they are acceptance rates of drawn proposals for sampled "
        "text, and other proposals or texts are accepted at other rates"
    )


def tokens_per_s(value: float | None) -> str:
    """A speed, or "not published" where its measurement was implausible."""
    return "not published" if value is None else figure(value)


def _speed(result: BenchmarkResult) -> str:
    speed = result.speed
    faster = "not published" if speed.speedup is None else f"{speed.speedup:.2f}×"
    return (
        f"{tokens_per_s(speed.plain_tokens_per_s)} tokens/s plain at batch 1, "
        f"{tokens_per_s(speed.speculative_tokens_per_s)} speculative, speed-up {faster} at acceptance length "
        f"{speed.acceptance_length:.2f} ({speed.note})"
    )


def _sampled_proposals(result: BenchmarkResult) -> str | None:
    greedy, drawn, at = result.sampled, result.sampled_drawn, result.conditions.lookahead
    if greedy is None or drawn is None:
        return None
    return (
        f"at {sampling(result.conditions)} and lookahead {at}, {greedy.length[at]:.2f} where the draft proposes its "
        f"likeliest tokens, {drawn.length[at]:.2f} where it draws them"
    )


def suite_findings(result: BenchmarkResult) -> dict[str, str]:
    """Acceptance length on every suite, by category and by prompt tokens, at the benchmark's lookahead."""
    return {f"Suite {suite.name}": _suite(suite) for suite in result.suites}


def _suite(suite: SuiteResult) -> str:
    too_long = f"; {plural(suite.too_long, 'question')} too long" if suite.too_long else ""
    text = f"{_group(suite.whole)}{too_long}; distinct-token share {suite.distinct_token_share:.2f}"
    for parts, groups in (("category", suite.by_category), ("prompt tokens", suite.by_context)):
        if len(groups) > 1:
            text += f"; by {parts}: " + ", ".join(f"{group.group} {_group(group)}" for group in groups)
    return text


def _group(part: GroupAcceptance) -> str:
    length = "no complete step" if part.length is None else f"{part.length:.2f}"
    champion = "" if part.champion is None else f", champion {part.champion:.2f}"
    return f"{length} ({plural(part.conversations, 'text')}{champion})"
