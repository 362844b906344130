"""Writes the measured tables of docs/scale.md anew: what stands between `<!-- NAME -->` and `<!-- end -->`.

python benchmarks/scale_page.py
"""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "scale.md"
RESULT = ROOT / "benchmarks" / "results" / "ledger.json"
LABEL = re.compile(r"(?P<database>\w+), (?P<generators>\d+) generators, (?P<leased>\d+) samples leased at a time")
DATABASES = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}
OPERATIONS = ("lease", "publish", "plan", "release", "commit", "progress")
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


def page(text: str) -> str:
    """The page with its tables as the results are."""
    result = json.loads(RESULT.read_text())
    for name, table in (("rates", rates), ("growth", growth)):
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(\n<!-- end -->)", re.DOTALL)
        text, count = pattern.subn(lambda found, table=table: found[1] + "\n".join(table(result)) + found[2], text)
        assert count == 1, f"{PAGE} has {count} places for the table {name}"
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
