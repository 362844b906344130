"""Reasoning in what an assistant says: `<think>...</think>` in its text. Pure text.

Used where samples are prepared, and where benchmarks say under which conditions they ran. A template may open the block
in the prompt, so that the text begins inside it and holds its end only.
"""

import re

OPENED, CLOSED = "<think>", "</think>"

_BLOCK = re.compile(r"<think>.*?(?:</think>\s*|\Z)", re.DOTALL)
"""A block that was cut before its end reaches to the end of the text."""
_BEGUN = re.compile(r"<think>\s*(?!\s|</think>)\S")

Span = tuple[int, int]
"""First character, and the one after the last."""


def without_thinking(text: str) -> str:
    """The answer alone."""
    return _BLOCK.sub("", text[_opened_before(text, 0, len(text)) :])


def thinks(text: str) -> bool:
    """Whether a text holds reasoning; templates write empty blocks where there is none."""
    inside = text[: _opened_before(text, 0, len(text))].rstrip().removesuffix(CLOSED)
    return bool(inside.strip()) or _BEGUN.search(text) is not None


def thinking_spans(text: str, span: Span) -> list[Span]:
    """The blocks inside a span of `text`, in order, tags and the space behind them included."""
    start, end = span
    behind = _opened_before(text, start, end)
    found = [(start, behind)] if behind > start else []
    return [*found, *(match.span() for match in _BLOCK.finditer(text, behind, end))]


def _opened_before(text: str, start: int, end: int) -> int:
    """Where a block ends that was open at `start`; `start` where none was."""
    closed = text.find(CLOSED, start, end)
    if closed < 0 or text.find(OPENED, start, closed) >= 0:
        return start
    behind = closed + len(CLOSED)
    while behind < end and text[behind].isspace():
        behind += 1
    return behind
