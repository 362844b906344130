"""The result of benchmarks/methods.py as JSON and as a Markdown table."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infra.files.atomic import write_atomically

RESULTS = Path(__file__).parent / "results"
LEAST_DISTINCT = 0.3
"""Of text below, acceptance says how well a method copies."""


def write_result(path: Path, about: dict[str, Any], chosen: dict[str, float], cells: dict[str, Any]) -> None:
    """Write `path` and the Markdown page beside it."""
    tests = [_test(name, cell) for name, cell in cells.items() if name.startswith("test ")]
    trials = {
        method: {
            f"{share:g}": {**cells[f"train {method} {share:g}"], "validation": cells[f"validate {method} {share:g}"]}
            for share in about["rates"]
        }
        for method in chosen
    }
    result = about | {"chosen": chosen, "trials": trials, "tests": tests}
    write_atomically(path, json.dumps(result, indent=1) + "\n")
    write_atomically(path.with_suffix(".md"), "\n".join(_page(result)) + "\n")


def _test(name: str, cell: dict[str, Any]) -> dict[str, Any]:
    *method, prompts, temperature = name.removeprefix("test ").split(" ")
    return {"method": " ".join(method), "prompts": prompts, "temperature": float(temperature), **cell}


def _page(result: dict[str, Any]) -> Iterator[str]:
    under = result["tests"][0]["conditions"]
    yield f"# Draft methods on {under['target']}"
    yield ""
    yield (
        f"Acceptance length at lookahead {under['lookahead']} by real speculative decoding ({under['engine']}, "
        f"{under['dtype']}, {under['max_new_tokens']} new tokens at most, {under['hardware']}), 95 % interval by "
        f"bootstrap over conversations. Commit {result['commit']}, {result['date']}. Made by `benchmarks/methods.py`, "
        "whose docstring says how text and prompts were chosen."
    )
    for temperature in dict.fromkeys(test["temperature"] for test in result["tests"]):
        cells = [test for test in result["tests"] if test["temperature"] == temperature]
        what = f"Temperature {temperature:g}" if temperature else "Greedy"
        apart = _apart(cells)
        yield from _table(what, [test for test in cells if test["prompts"] not in apart])
        yield from _table(f"{what}: text that repeats itself (distinct-token share under {LEAST_DISTINCT})",
                          [test for test in cells if test["prompts"] in apart])  # fmt: skip
    yield from _trials(result)


def _apart(cells: list[dict[str, Any]]) -> set[str]:
    """Sets of prompts on which the target's text repeats itself: mean over methods."""
    shares: dict[str, list[float]] = {}
    for test in cells:
        shares.setdefault(test["prompts"], []).append(test["distinct_token_share"])
    return {prompts for prompts, of in shares.items() if sum(of) / len(of) < LEAST_DISTINCT}


def _table(title: str, cells: list[dict[str, Any]]) -> Iterator[str]:
    if not cells:
        return
    sets = list(dict.fromkeys(test["prompts"] for test in cells))
    found = {(test["method"], test["prompts"]): test for test in cells}
    yield from ("", f"## {title}", "")
    yield f"| method | {' | '.join(f'{name} ({_conversations(cells, name)})' for name in sets)} |"
    yield f"|---|{'---|' * len(sets)}"
    for method in dict.fromkeys(test["method"] for test in cells):
        shown = [f"{one['length']:.2f} ({one['low']:.2f} to {one['high']:.2f})" for one in (found[method, name] for name in sets)]  # noqa: E501 # fmt: skip
        yield f"| {method} | {' | '.join(shown)} |"


def _conversations(cells: list[dict[str, Any]], prompts: str) -> int:
    return next(test["conversations"] for test in cells if test["prompts"] == prompts)


def _trials(result: dict[str, Any]) -> Iterator[str]:
    yield from ("", "## Trials", "")
    yield "Each once over the same samples; the best on the validation prompts at temperature 1 was tested."
    yield ""
    yield "| method | learning rate | training tokens | exported MB | seconds | validation | tested |"
    yield "|---|---|---|---|---|---|---|"
    for method, trials in result["trials"].items():
        for share, trial in trials.items():
            seen = trial["validation"]
            tested = "yes" if float(share) == result["chosen"][method] else ""
            yield (
                f"| {method} | {float(share) * result['learning_rate']:.2g} | {trial['tokens']:,} | "
                f"{trial['export_bytes'] / 1e6:.1f} | {trial['seconds']:.0f} | {seen['length']:.2f} "
                f"({seen['low']:.2f} to {seen['high']:.2f}) | {tested} |"
            )
