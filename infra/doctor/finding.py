"""The result of one check of `draftsmith doctor`."""

from typing import Literal

from infra.records.data_path import Record

Verdict = Literal["ok", "note", "problem"]
"""ok: nothing to do; note: worth knowing, the quickstart runs; problem: it does not run, or not safely."""


class Finding(Record):
    """One fact about this machine, what it means, and what to do about it."""

    name: str = ""
    """A probe leaves it, and the remedy, to the table of checks unless it has a better one."""
    verdict: Verdict
    found: str
    remedy: str = ""

    def named(self, name: str, remedy: str) -> "Finding":
        """With the name and the remedy of the table's row, where it has none of its own."""
        remedy = "" if self.verdict == "ok" else self.remedy or remedy
        return self.model_copy(update={"name": self.name or name, "remedy": remedy})


def judge(found: str, *, problem: bool = False, note: bool = False, name: str = "", remedy: str = "") -> Finding:
    """What a probe found, with the graver verdict that holds."""
    verdict = "problem" if problem else "note" if note else "ok"
    return Finding(name=name, verdict=verdict, found=found, remedy=remedy)
