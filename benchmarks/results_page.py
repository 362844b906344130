"""Writes docs/results.md: measured figures with their conditions, from files of benchmarks/results/.

    python benchmarks/results_page.py

A test fails when the page does not match the files.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from learning_facts import continued, engines, float8, learning_curve, mtp, optimizers, regeneration
from live_facts import live, live_flow, live_loop, one_pass_learned
from page_conditions import commit, conditions
from speed_facts import (
    block_step,
    capture,
    context_parallel,
    data_wait,
    decode_capture,
    ledger,
    overhead,
    packing,
    planner,
    stored,
    transport,
)

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[1] / "docs" / "results.md"
TITLE = """# Results

Everything here was measured on CPUs; nothing was measured on a GPU. `python benchmarks/results_page.py` writes this
page from the files of `benchmarks/results/`, which hold further conditions. Repeat a measurement with the script
named.

Conditions are the processor's cores, its model where the file names it, the day, and the commit that was measured;
`-dirty` means that files differed from that commit. "unknown commit" means that the file names none, or one that
history does not hold.
"""

Json = dict[str, Any]
Fact = tuple[str, str] | tuple[str, str, Json]
Facts = Callable[[Json], Iterable[Fact]]
"""What was measured, the figure, and the run that it is from, where a file holds several."""


@dataclass(frozen=True)
class Section:
    """Rows about one topic."""

    title: str
    rows: tuple[tuple[str, str, Facts], ...]
    """Result file without `.json`, script, and the facts that the file holds."""


def lossless(result: Json) -> Iterable[tuple[str, str]]:
    tokens = result.get("tokens") or result["lossless"]["tokens"]
    differing = result["mismatches"] if "mismatches" in result else result["lossless"]["mismatches"]
    target = result["conditions"]["target"].rpartition("-")[0]
    how = f"{target} decoded speculatively at lookahead {result['conditions']['lookahead']}"
    yield f"tokens of {how} and compared with plain decoding", f"{tokens:,}"
    yield f"of these tokens of {how}, those that differ", str(differing)


def agreement(result: Json) -> Iterable[Fact]:
    for one in result["sets"]:
        shown = ", ".join(f"{name} {length:.3f}" for name, length in one["lengths"].items())
        under = one["conditions"]
        yield (
            f"{under['target']}, {result['method']}: acceptance length on {one['prompts']} ({under['prompts']} "
            "prompts)",
            shown,
            result | {"conditions": under},
        )


def suffix(result: Json) -> Iterable[tuple[str, str]]:
    for name, suite in result["suites"].items():
        for temperature, lengths in suite["length"].items():
            yield (
                f"acceptance length at lookahead 4 of {', '.join(lengths)}; {name}, temperature {temperature}, "
                f"{suite['prompts']} prompts, {suite['log_tokens']:,} tokens in the log",
                ", ".join(f"{of['4']:.2f}" for of in lengths.values()),
            )


def chaos(result: Json) -> Iterable[tuple[str, str]]:
    yield f"seeds of runs under random faults ({len(result.get('struck', {}))} kinds)", f"{result['runs']}"
    yield (
        "of these, seeds whose newest run lost, doubled or quarantined a sample, differed in a weight, or left "
        "something",
        str(len(result["failed"])),
    )
    earlier = [f"{one['seed']} at {commit(one['commit'])}" for one in result["failed_before_a_later_commit"]]
    yield (
        "of these, seeds that failed at an earlier commit and were run again at a later one",
        ", ".join(earlier) or "0",
    )


def kills(result: Json) -> Iterable[tuple[str, str]]:
    for one in result["kills"]:
        yield f"seconds until the run goes on after {one['killed']} was killed", f"{one['goes_on_s']:.0f}"


def fuzz(result: Json) -> Iterable[tuple[str, str]]:
    counts = result["counts"].values()
    yield "malformed or odd inputs", f"{result['conditions']['cases']:,}"
    yield "tracebacks, hangs, refusals without place or remedy", str(sum(one["fault"] for one in counts))


def soak(result: Json) -> Iterable[tuple[str, str]]:
    yield "simulated days of traffic, drift, promotion and rollback", str(len(result["days"]))
    yield "faults in these days", str(len(result["faults"]))


def year(result: Json) -> Iterable[tuple[str, str]]:
    last = result["bytes_by_week"][-1]
    for name, size in last.items():
        growth = result["growth_in_the_last_weeks"][name] - 1
        yield (
            f"{name} after {result['weeks']} weeks (growth in the last quarter)",
            f"{size / 2**20:.1f} MiB ({growth:+.1%})",
        )


def follower(result: Json) -> Iterable[tuple[str, str]]:
    for kind, whole in result["whole"].items():
        yield f"rollouts over {result['servers']} SGLang servers, with kills, that ended right: version {kind}", whole
    earlier = result.get("failed_before_a_later_attempt")
    shown = ", ".join(f"{one['seed']} at {commit(one['commit'])}" for one in earlier or ())
    again = "not recorded" if earlier is None else shown
    yield "of these rollouts, seeds that did not end right and were run again", again or "0"
    yield "requests that were lost meanwhile", f"{result['lost']} of {result['sent']:,}, {result['retried']} sent again"


def bench(result: Json) -> Iterable[tuple[str, str]]:
    yield (
        "`draftsmith bench`, Gemma 3 270M, two suites of 32 prompts, 64 tokens, temperatures 0 and 1, all baselines",
        f"{result['wall_s']:.0f} s",
    )


def quarter(result: Json) -> Iterable[tuple[str, str]]:
    told = result["totals"]
    yield (
        f"wrong promotions in {told['quarters']} simulated quarters of a draft; most needless retrainings in one",
        f"{told['wrong_promotions']} of {told['promoted']}; {told['needless_most_per_draft']}",
    )
    yield (
        "changes of traffic or target that a promoted draft answered",
        f"{told['changes_answered_by_a_promotion']} of {told['changes']}",
    )
    yield (
        "decisions that came out otherwise from their stored evidence; days on which the overview was wrong",
        f"{told['decisions_not_replayed']}; {told['wrong_days_of_the_overview']}",
    )


def rollout(result: Json) -> Iterable[tuple[str, str]]:
    for gain, one in result["served_decides"].items():
        yield (
            f"needless retrainings / wrong rollbacks in {one['months']} months of rollouts of a draft better by {gain}",
            f"{one['retrainings']} / {one['rollbacks']}",
        )


def sampled_walk(result: Json) -> Iterable[tuple[str, str]]:
    cells = result["cells"]
    steps = sum(cell["real"]["steps"] for cell in cells)
    wrong = max(p for cell in cells for p in cell.get("wrong_ratio_p", {}).values())
    yield (
        f"acceptance by position over sampled text against real decoding, {result['target']}, {steps:,} steps, "
        f"{len(cells)} comparisons: smallest p; largest p of a walk by a wrong ratio",
        f"{result['smallest_p']:.3f}; {wrong:.0e}",
    )
    slow = [cell["one_by_one"]["efficiency"] for cell in cells if "one_by_one" in cell]
    for of, what in (("one", "of one acceptance length"), ("all", "of 14 (7 lookaheads, 2 rules)")):
        together = [cell["efficiency"][of] for cell in cells]
        alone = [efficiency[of] for efficiency in slow]
        yield (
            f"standard error {what} by real decoding, 64 texts at once (one), over the walk's at equal CPU time",
            f"{min(together):.1f} to {max(together):.1f} times ({min(alone):.1f} to {max(alone):.1f})",
        )


def calibration(result: Json) -> Iterable[tuple[str, str]]:
    for way in result["ways"]:
        worst = max(range(len(way["errors_after"])), key=way["errors_after"].__getitem__)
        yield (
            f"DSpark on {result['conditions']['target'].rpartition('-')[0]}, {way['way']}: calibration error of "
            f"confidences at the worst position, {way['steps_judged']:,} steps (± standard error; of exact chances)",
            f"{way['errors_after'][worst]:.1%} (± {way['standard_errors'][worst]:.1%}; {way['by_chance'][worst]:.1%})",
        )


def trees(result: Json) -> Iterable[tuple[str, str]]:
    for load in result["loads"]:
        errors = [one["error"] for one in load["chains"]]
        shown = ", ".join(f"{one['shape'].removeprefix('dynamic-')} {one['error']:+.1%}" for one in load["trees"])
        what = "dynamic trees (depth-top-k-tokens); of lookaheads; what the rule runs, and the best tree, against the"
        yield (
            f"{result['conditions']['target']}, greedy, texts at once {load['batch']}: predicted against measured "
            f"goodput of {what} fastest lookahead",
            f"{shown}; {min(errors):+.1%} to {max(errors):+.1%}; {load['better_against_best_chain']:+.1%}, "
            f"{load['against_best_chain']:+.1%}",
        )


def scheduled(result: Json) -> Iterable[tuple[str, str]]:
    for load in result["loads"]:
        texts = f"{load['batch']} texts at once" if load["batch"] > 1 else "1 text at once"
        ways = load["ways"]
        yield (
            f"DSpark, sampled, {texts}: predicted against measured goodput of scheduled verification; of fixed "
            "lookaheads",
            f"{ways[-1]['error']:+.1%}; {min(way['error'] for way in ways[:-1]):+.1%} to "
            f"{max(way['error'] for way in ways[:-1]):+.1%}",
        )
        yield (
            f"goodput of scheduled verification against whole blocks; against the best lookahead, {texts}",
            f"{load['against_whole_block']:+.1%}; {load['against_best_lookahead']:+.1%}",
        )


SECTIONS = (
    Section(
        "Decoding and acceptance",
        (
            ("lossless", "lossless.py", lossless),
            ("lossless-gemma3-270m", "lossless.py", lossless),
            ("lossless-blocks", "lossless.py", lossless),
            ("suffix", "suffix.py", suffix),
            ("one_pass_learned", "one_pass_learned.py", one_pass_learned),
            ("regeneration", "regeneration.py", regeneration),
            ("mtp", "mtp.py", mtp),
            ("optimizers", "optimizers.py", optimizers),
            ("learning_curve", "learning_curve.py", learning_curve),
            ("agreement-tiny-eagle3", "agreement.py", agreement),
            ("agreement-tiny-dflash", "agreement.py", agreement),
            ("agreement-quickstart-eagle3", "agreement.py", agreement),
            ("engines", "engines.py", engines),
            ("sampled_walk", "sampled_walk.py", sampled_walk),
            ("float8-tiny", "float8.py", float8),
            ("continued", "continued.py", continued),
            ("calibration", "calibration.py", calibration),
            ("scheduled-tiny", "scheduled.py", scheduled),
            ("trees-tiny", "trees.py", trees),
            ("trees-quickstart", "trees.py", trees),
        ),
    ),
    Section(
        "Speed and memory",
        (
            ("block_step", "block_step.py", block_step),
            ("bench", "draftsmith bench", bench),
            ("capture_cost", "capture_cost.py", capture),
            ("decode_capture", "decode_capture.py", decode_capture),
            ("live", "live.py", live),
            ("data_wait", "data_wait.py", data_wait),
            ("transport", "transport.py", transport),
            ("ledger", "ledger.py", ledger),
            ("stored", "stored.py", stored),
            ("packing", "packing.py", packing),
            ("context_parallel", "context_parallel.py", context_parallel),
            ("planner", "planner.py", planner),
            ("overhead", "overhead.py", overhead),
        ),
    ),
    Section(
        "Faults and months of operation",
        (
            ("chaos", "chaos.py", chaos),
            ("kills", "kills.py", kills),
            ("fuzz", "fuzz.py", fuzz),
            ("soak", "soak.py", soak),
            ("year", "year.py", year),
            ("rollout", "rollout.py", rollout),
            ("follower", "follower.py", follower),
            ("quarter", "quarter.py", quarter),
            ("live_loop", "live_loop.py", live_loop),
            ("live_flow", "live_flow.py", live_flow),
        ),
    ),
)


def served_by_vllm(result: Json) -> list[str]:
    """Counts of vLLM beside the reference decoder's."""
    titles = "method", "target", "prompts", "same text", "same counts among them", "steps, accepted: reference", "vLLM"
    rows = [f"| {' | '.join(titles)} |", "|---|---|--:|--:|--:|--:|--:|"]
    for one in result["served"]:
        sums = [f"{one[who]['steps']}, {sum(one[who]['accepted_by_position'])}" for who in ("reference", "vllm")]
        cells = one["method"], one["target_dtype"], one["prompts"], one["same_text"], one["same_counts"], *sums
        rows.append(f"| {' | '.join(map(str, cells))} |")
    under = f"{result['max_new_tokens']} new tokens, lookahead {result['lookahead']}, greedy"
    return [
        "## vLLM on the CPU",
        "",
        f"Drafts of {result['target']} in vLLM {result['vllm']} (`vllm_served.py`): {under}; {conditions(result)}.",
        f"vLLM's own code read {len(result['settings'])} kinds of exports with the settings of training.",
        "",
        *rows,
        "",
        *(f"- Not served: {what}: {why}." for what, why in result["not_served"].items()),
        "",
    ]


def page() -> str:
    """The page's Markdown."""
    lines = [TITLE]
    for section in SECTIONS:
        lines += [f"## {section.title}", "", "| measured | figure | conditions | script |", "|---|--:|---|---|"]
        for name, script, facts in section.rows:
            result = json.loads((RESULTS / f"{name}.json").read_text())
            for what, figure, *run in facts(result):
                lines.append(f"| {what} | {figure} | {conditions(*run or [result])} | `{script}` |")
        lines.append("")
    lines += served_by_vllm(json.loads((RESULTS / "vllm.json").read_text()))
    lines += ["## Draft methods", ""]
    name, older = "methods-gemma3-270m", "methods-tiny"
    lines += [f"[{name}](../benchmarks/results/{name}.md): acceptance by method, temperature and kind of prompt.", ""]
    lines += [
        f"[{older}](../benchmarks/results/{older}.json): the same of the tiny target, measured by an earlier form of "
        "`methods.py`: by real decoding, with greedy proposals.",
        "",
    ]
    curves = "method-curves-tiny"
    lines += [f"[{curves}](../benchmarks/results/{curves}.md): acceptance by method and number of training tokens.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
