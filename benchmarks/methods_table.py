"""The results of benchmarks/methods.py and method_curves.py as JSON and as Markdown tables."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from infra.files.atomic import write_atomically

RESULTS = Path(__file__).parent / "results"
LEAST_DISTINCT = 0.3
"""Of text below, acceptance says how well a method copies."""
VALIDATION, MAIN = "validation", "1"


def write_result(
    path: Path, about: Mapping[str, Any], methods: Sequence[str], baselines: Sequence[str], cells: Mapping[str, Any]
) -> None:
    """Write `path` and the Markdown page beside it."""
    trials = {method: {f"{rate:g}": cells[f"{method} {rate:g}"] for rate in about["rates"]} for method in methods}
    chosen = {method: max(of, key=lambda rate: of[rate]["walks"][VALIDATION][MAIN]["length"]) for method, of in trials.items()}  # noqa: E501 # fmt: skip
    result = {**about, "chosen": chosen, "trials": trials, "baselines": {name: cells[name] for name in baselines}}
    write_atomically(path, json.dumps(result, indent=1) + "\n")
    write_atomically(path.with_suffix(".md"), page(result))


def page(result: dict[str, Any]) -> str:
    """The Markdown page of a result of either script."""
    return "\n".join(_page(result) if "chosen" in result else _curves(result)) + "\n"


def told(walk: Mapping[str, float]) -> str:
    """A length with its interval."""
    return f"{walk['length']:.2f} ({walk['low']:.2f} to {walk['high']:.2f})"


def under(result: Mapping[str, Any]) -> str:
    """What a table was measured under."""
    return (
        f"Acceptance length at lookahead {result['lookahead']} by the walk over the target's own text "
        f"({result['max_new_tokens']} new tokens at most), 95 % interval by {result['interval']} over conversations. "
        f"Training in {result['dtypes']['training']} on one thread of {result['cpu']}, one seed; {result['date']}, "
        f"commit {result['commit']}. `benchmarks/methods.py` says how text and prompts were chosen."
    )


def _page(result: dict[str, Any]) -> Iterator[str]:
    yield from (f"# Draft methods on {result['target']}", "", under(result))
    walks = {method: result["trials"][method][rate]["walks"] for method, rate in result["chosen"].items()}
    walks |= {name: cell["walks"] for name, cell in result["baselines"].items()}
    for temperature, what in ((MAIN, "Temperature 1, proposals drawn"), ("0", "Greedy")):
        sets = [name for name in result["prompts"] if name != VALIDATION]
        shares = result["distinct_token_shares"]
        apart = [name for name in sets if shares[f"{name} {temperature}"] < LEAST_DISTINCT]
        yield from _table(what, walks, [name for name in sets if name not in apart], temperature)
        repeats = f"{what}: text that repeats itself (distinct-token share under {LEAST_DISTINCT})"
        yield from _table(repeats, walks, apart, temperature)
    yield from _trials(result)


def _table(title: str, walks: Mapping[str, Any], sets: list[str], temperature: str) -> Iterator[str]:
    if not sets:
        return
    yield from ("", f"## {title}", "", f"| method | {' | '.join(sets)} | mean |", f"|---|{'---|' * (len(sets) + 1)}")
    for method, of in walks.items():
        cells = [of[name][temperature] for name in sets]
        mean = sum(cell["length"] for cell in cells) / len(cells)
        yield f"| {method} | {' | '.join(map(told, cells))} | {mean:.2f} |"


def _trials(result: dict[str, Any]) -> Iterator[str]:
    yield from ("", "## Trials", "")
    yield "Each once over the same samples; the best on the validation prompts at temperature 1 is in the tables above."
    yield ""
    yield "| method | learning rate | training tokens | trained parameters | CPU seconds | validation | chosen |"
    yield "|---|---|---|---|---|---|---|"
    for method, trials in result["trials"].items():
        for rate, trial in trials.items():
            seen = trial["walks"][VALIDATION][MAIN]
            yield (
                f"| {method} | {float(rate) * result['learning_rate']:.2g} | {trial['tokens']:,} | "
                f"{trial['parameters']:,} | {trial['cpu_s']:.0f} | {told(seen)} | "
                f"{'yes' if rate == result['chosen'][method] else ''} |"
            )


def write_curves(path: Path, about: Mapping[str, Any], cells: Mapping[str, Any]) -> None:
    """Write `path` and the Markdown page beside it."""
    result = {**about, "trials": list(cells.values())}
    write_atomically(path, json.dumps(result, indent=1) + "\n")
    write_atomically(path.with_suffix(".md"), page(result))


def _curves(result: dict[str, Any]) -> Iterator[str]:
    trials: list[dict[str, Any]] = result["trials"]
    methods = list(dict.fromkeys(trial["method"] for trial in trials))
    yield from (f"# Draft methods on {result['target']}: acceptance against training tokens", "", under(result), "")
    yield (
        "Temperature 1, proposals drawn; means over the test sets, a value for each seed. Every training is from "
        "scratch, at the method's best learning rate."
    )
    yield from ("", f"| training tokens | {' | '.join(methods)} |", f"|---|{'---|' * len(methods)}")
    for samples in dict.fromkeys(trial["samples"] for trial in trials):
        here = [trial for trial in trials if trial["samples"] == samples]
        cells = [", ".join(f"{_mean(one):.2f}" for one in here if one["method"] == method) for method in methods]
        yield f"| {here[0]['tokens']:,} | {' | '.join(cells)} |"


def _mean(trial: Mapping[str, Any]) -> float:
    lengths = [walks[MAIN]["length"] for name, walks in trial["walks"].items() if name != VALIDATION]
    return sum(lengths) / len(lengths)
