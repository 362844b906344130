"""Writes the measured tables of docs/scale.md anew: what stands between `<!-- NAME -->` and `<!-- end -->`.

python benchmarks/scale_page.py
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "scale.md"
RESULTS = ROOT / "benchmarks" / "results"
LABEL = re.compile(r"(?P<database>\w+), (?P<generators>\d+) generators, (?P<leased>\d+) samples leased at a time")
DATABASES = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}
OPERATIONS = ("lease", "publish", "plan", "release", "commit", "progress")
PLACES = {
    "put anywhere": "put",
    "put near": "put near the reader",
    "get anywhere": "get",
    "get near": "get, put near the reader",
}
Json = dict[str, Any]


def rates(result: Json) -> list[str]:
    """Samples per second by database, number of generators and size of a group."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for label, rate in result["samples_per_s"].items():
        part = LABEL.fullmatch(label)
        assert part, label
        found.setdefault((part["database"], part["generators"]), {})[part["leased"]] = rate
    sizes = sorted(next(iter(found.values())), key=int)
    rows = [
        f"| samples/s | {' | '.join(f'`lease_samples={size}`' for size in sizes)} |",
        f"|---|{'--:|' * len(sizes)}",
    ]
    for (database, generators), of in found.items():
        processes = "1 generator" if generators == "1" else f"{generators} generators"
        rows.append(f"| {DATABASES[database]}, {processes} | {' | '.join(f'{of[size]:,.0f}' for size in sizes)} |")
    return rows


def growth(result: Json) -> list[str]:
    """Milliseconds of each operation by the number of samples of the run."""
    columns = [
        (DATABASES[database], int(count), times)
        for database, by_rows in result["milliseconds_by_rows"].items()
        for count, times in sorted(by_rows.items(), key=lambda item: int(item[0]))
    ]
    rows = [
        f"| ms | {' | '.join(f'{database}, {count:,} samples' for database, count, _ in columns)} |",
        f"|---|{'--:|' * len(columns)}",
    ]
    for name in OPERATIONS:
        rows.append(f"| {name} | {' | '.join(f'{times[name]:,.1f}' for *_, times in columns)} |")
    return rows


def stores(result: Json) -> list[str]:
    """MiB per second by number of stores, without a limit and with one."""
    by_rate = result["by_link_mbit_and_stores"]
    counts = list(next(iter(by_rate.values())))
    heads = [f"{count} store{'s' if count != '1' else ''}" for count in counts]
    rows = [f"| MiB/s | {' | '.join(heads)} |", f"|---|{'--:|' * len(counts)}"]
    for rate, by_count in by_rate.items():
        link = f"links of {rate} Mbit/s" if int(rate) else "no limit but two cores"
        for what, words in PLACES.items():
            figures = (f"{by_count[count]['mib_per_s'][what]:,.0f}" for count in counts)
            rows.append(f"| {words}, {link} | {' | '.join(figures)} |")
    memory = (f"{next(iter(by_rate.values()))[count]['memory_mib']:,}" for count in counts)
    return [*rows, f"| memory, MiB | {' | '.join(memory)} |"]


def preparation(result: Json) -> list[str]:
    """Memory and speed of preparing many conversations."""
    parts = -(-result["conversations"] // 256)
    rest = result["conversations"] * (parts - result["parts_before_the_kill"]) / parts
    return [
        "| | |",
        "|---|--:|",
        f"| conversations, tokens | {result['conversations']:,}, {result['tokens']:,} |",
        f"| peak memory of the process that collects | {result['peak_mib']:,} MiB |",
        f"| peak memory of a process that tokenizes | {result['peak_mib_of_a_helper']:,} MiB |",
        f"| parts kept from before the kill | {result['parts_before_the_kill']:,} of {parts:,} |",
        f"| seconds for the rest, and for collecting all | {result['wall_s']:,.0f} |",
        f"| conversations per second of a core, at least | {rest / result['cpu_s']:,.0f} |",
    ]


def rehearsal(result: Json) -> list[str]:
    """What each plan sustained, and the load of each part."""
    by_gpus = result["by_gpus"]
    rows = [f"| | {' | '.join(f'{gpus} GPUs' for gpus in by_gpus)} |", f"|---|{'--:|' * len(by_gpus)}"]

    def row(words: str, figure: Callable[[Json], str]) -> str:
        return f"| {words} | {' | '.join(figure(one) for one in by_gpus.values())} |"

    rows.append(row("rates divided by", lambda one: f"{one['time_slower_by']:g}"))
    rows.append(row("planned samples/s", lambda one: f"{one['planned_samples_per_s']:,.0f}"))
    rows.append(row("sustained, of the plan", lambda one: f"{one['of_plan']:.1%}"))
    rows.append(
        row("most held in the store, of its budget", lambda one: f"{one['most_held_gib'] / one['budget_gib']:.0%}")
    )
    for name in next(iter(by_gpus.values()))["load"]:
        rows.append(row(f"load: {name}", lambda one, name=name: f"{one['load'][name]:.1%}"))
    rows.append(row("first limit", lambda one: one["first_limit"]))
    rows.append(row("the plan's rates may grow by", lambda one: f"{1 / one['load'][one['first_limit']]:.1f}"))
    return rows


def concurrent(result: Json) -> list[str]:
    """How runs share a server."""
    return [
        "| runs at once | samples/s, all together | slowest run, of the mean | fastest |",
        "|--:|--:|--:|--:|",
        *(
            f"| {runs} | {one['samples_per_s']:,.0f} | {one['slowest_of_mean']:.2f} | {one['fastest_of_mean']:.2f} |"
            for runs, one in result["by_runs"].items()
        ),
    ]


def spanning(result: Json) -> list[str]:
    """Runs whose server is on one machine, and on two."""
    rows = ["| | steps | last loss | prompts prefilled, by machine | restarts |", "|---|--:|--:|--:|--:|"]
    for name, case in result["cases"].items():
        prompts = " + ".join(str(count) for count in case["prompts_prefilled"])
        rows.append(f"| {name} | {case['steps']} | {case['last_loss']:.4f} | {prompts} | {case['restarts']} |")
    return rows


def flows(result: Json) -> list[str]:
    """What runs cost that share a Prefect server and an MLflow server."""
    rows = [
        "| runs at once | CPU seconds per run: command, Prefect, MLflow, PostgreSQL | cores per run while it trains |"
    ]
    rows[0] += " memory of the command, MiB | mean and slowest end, s |"
    rows.append("|--:|---|--:|--:|--:|")
    for runs, one in result["by_runs"].items():
        seconds = ", ".join(f"{one['cpu_s'][name]:.1f}" for name in ("command", "prefect", "mlflow", "postgres"))
        ends = f"{one['end_s']['mean']:.0f}, {one['end_s']['slowest']:.0f}"
        rows.append(f"| {runs} | {seconds} | {sum(one['watched'].values()):.4f} | {one['command_mib']} | {ends} |")
    return rows


TABLES: dict[str, tuple[str, Callable[[Json], list[str]]]] = {
    "stores": ("stores", stores),
    "rates": ("ledger", rates),
    "growth": ("ledger", growth),
    "concurrent": ("concurrent_runs", concurrent),
    "preparation": ("preparation", preparation),
    "rehearsal": ("rehearsal", rehearsal),
    "spanning": ("spanning", spanning),
    "flows": ("many_flows", flows),
}
"""By its name in the page: the file of results, and what makes the table of it."""


def page(text: str) -> str:
    """The page with its tables as the results are."""
    for name, (file, table) in TABLES.items():
        rows = table(json.loads((RESULTS / f"{file}.json").read_text()))
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        text, count = pattern.subn(lambda found, rows=rows: found[1] + "\n".join([*rows, found[2]]), text)
        assert count == 1, f"{PAGE} has {count} places for the table {name}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
