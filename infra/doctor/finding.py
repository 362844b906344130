"""The result of one check of `draftsmith doctor`."""

from typing import Literal

from infra.records.data_path import Record

GIB = 2**30


class Finding(Record):
    """One fact about this machine, what it means, and what to do about it."""

    name: str
    verdict: Literal["ok", "note", "problem"]
    """ok: nothing to do; note: worth knowing, the quickstart runs; problem: it does not run, or not safely."""
    found: str
    remedy: str = ""


def ok(name: str, found: str) -> Finding:
    """Nothing to do."""
    return Finding(name=name, verdict="ok", found=found)


def note(name: str, found: str, remedy: str) -> Finding:
    """Worth knowing; the quickstart runs all the same."""
    return Finding(name=name, verdict="note", found=found, remedy=remedy)


def problem(name: str, found: str, remedy: str) -> Finding:
    """The quickstart does not run on this machine, or not safely."""
    return Finding(name=name, verdict="problem", found=found, remedy=remedy)
