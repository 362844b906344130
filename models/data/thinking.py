"""Reasoning in a text: `<think>...</think>`.

A template may open the block in the prompt; the text then begins inside it and only contains its end.
"""

import re

Span = tuple[int, int]
"""First character, and one past the last."""
OPENED, CLOSED = "<think>", "</think>"
_BLOCK = re.compile(r"<think>.*?(?:</think>\s*|\Z)", re.DOTALL)
"""A block without an end extends to the end of the text."""
EMPTY_BLOCK = re.compile(r"<think>\s*</think>\s*")
_BEGUN = re.compile(r"<think>\s*(?!\s|</think>)\S")


def without_thinking(text: str) -> str:
    """The answer without reasoning."""
    return _BLOCK.sub("", text[_opened_before(text, 0, len(text)) :])


def thinks(text: str) -> bool:
    """Whether a text contains reasoning; templates may write empty blocks, which do not count."""
    inside = text[: _opened_before(text, 0, len(text))].rstrip().removesuffix(CLOSED)
    return bool(inside.strip()) or _BEGUN.search(text) is not None


def split_thinking(text: str) -> tuple[str, str]:
    """The reasoning of all blocks, without tags, and the answer."""
    thoughts = [text[start:end].strip() for start, end in thinking_spans(text, (0, len(text)))]
    return "\n".join(thought.removeprefix(OPENED).removesuffix(CLOSED).strip() for thought in thoughts), (
        without_thinking(text)
    )


def thinking_spans(text: str, span: Span) -> list[Span]:
    """The blocks inside a span of `text`, in order, with their tags and the white space after them."""
    start, end = span
    closed = _opened_before(text, start, end)
    opened_before = [(start, closed)] if closed > start else []
    return [*opened_before, *(match.span() for match in _BLOCK.finditer(text, closed, end))]


def _opened_before(text: str, start: int, end: int) -> int:
    """The end of a block that was open at `start`; `start` if there was none."""
    closed = text.find(CLOSED, start, end)
    if closed < 0 or text.find(OPENED, start, closed) >= 0:
        return start
    after = closed + len(CLOSED)
    while after < end and text[after].isspace():
        after += 1
    return after
