"""Under what a figure was measured, in a few words, for docs/results.md."""

import re
from collections.abc import Iterator
from typing import Any

Json = dict[str, Any]

NOT_IN_HISTORY = frozenset({"0492840", "0c5c350", "3774a08", "bd8a532", "fdece49"})
"""Commits that result files name and that history does not hold: they were rewritten before they were merged."""
OWN = {"hardware", "conditions", "commit"}
"""One of them is in the result of every single run."""


def conditions(result: Json) -> str:
    """Cores and processor, day and commit; of a file with several runs, those of each that differ.

    A draft or row that holds a commit of its own, because it was measured at another time than the rest, is named.
    """
    if not OWN & set(result):
        return "; ".join(dict.fromkeys(conditions(run) for run in result.values()))
    return "; ".join(dict.fromkeys((_of_one(result), *_measured_apart(result))))


def _measured_apart(result: Json) -> Iterator[str]:
    """Rows whose commit is not the result's."""
    named = list(result["drafts"].items()) if isinstance(result.get("drafts"), dict) else []
    rows = [row for kind in ("rows", "seeds") if isinstance(result.get(kind), list) for row in result[kind]]
    named += [(f"seed {row['seed']}", row) for row in rows if isinstance(row, dict) and "seed" in row]
    for name, row in named:
        if "commit" in row and row["commit"] != result.get("commit"):
            yield f"{name.rpartition(', ')[2]}: {_of_one(row)}"


def _of_one(run: Json) -> str:
    hardware = str(run.get("hardware") or run.get("conditions", {}).get("hardware") or "").partition(" (")[0]
    cpu = processor(run.get("cpu") or "")
    where = f"{hardware} ({cpu})" if hardware and cpu else hardware or cpu
    day = str(run.get("date") or run.get("at") or "")[:10]
    by_commit = run.get("runs_by_commit", {})
    if "commit" in run or not by_commit:
        shown = commit(str(run.get("commit", "")))
    else:
        shown = ", ".join(f"{commit(name)} ({runs})" for name, runs in by_commit.items())
    return ", ".join(part for part in (where, day, shown) if part)


def processor(model: str) -> str:
    """`Intel(R) Xeon(R) Processor` as `Intel Xeon`."""
    return " ".join(re.sub(r"\((R|TM)\)|\bProcessor\b|\bCPU\b|@.*", " ", model).split())


def commit(name: str) -> str:
    """Seven digits, with `-dirty` where files differed from the commit; what cannot be looked up is called unknown."""
    short, dirty = name.removesuffix("-dirty")[:7], "-dirty" if name.endswith("-dirty") else ""
    if not name or name == "unknown":
        return "unknown commit"
    return f"unknown commit ({short}{dirty})" if short in NOT_IN_HISTORY else short + dirty
