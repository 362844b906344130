"""Reasoning in a text: `<think>...</think>`.

A template may open the block in the prompt; the text then begins inside it and only contains its end.
"""

import re

Span = tuple[int, int]
"""First character, and one past the last."""
OPENED, CLOSED = "<think>", "</think>"
_FIRST_BLOCK = re.compile(r"\s*(<think>.*?(?:</think>\s*|\Z))", re.DOTALL)
"""A block without an end extends to the end of the text."""
EMPTY_BLOCK = re.compile(r"<think>\s*</think>\s*")


def without_thinking(text: str) -> str:
    """The answer without reasoning."""
    edges = [0, *(edge for span in thinking_spans(text, (0, len(text))) for edge in span), len(text)]
    return "".join(text[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True))


def thinks(text: str) -> bool:
    """Whether a text contains reasoning; templates may write empty blocks, which do not count."""
    return any(_thoughts(text))


def split_thinking(text: str) -> tuple[str, str]:
    """The reasoning of all blocks, without tags, and the answer."""
    return "\n".join(_thoughts(text)), without_thinking(text)


def thinking_spans(text: str, span: Span) -> list[Span]:
    """The blocks that a span of `text` begins with, in order, with their tags and the white space after them.

    A tag anywhere else is part of the answer: answers speak of `<think>`, too.
    """
    start, end = span
    closed = _opened_before(text, start, end)
    spans = [(start, closed)] if closed > start else []
    while block := _FIRST_BLOCK.match(text, spans[-1][1] if spans else start, end):
        spans.append(block.span(1))
    return spans


def _thoughts(text: str) -> list[str]:
    """The reasoning in each block, without tags."""
    blocks = (text[start:end].strip() for start, end in thinking_spans(text, (0, len(text))))
    return [block.removeprefix(OPENED).removesuffix(CLOSED).strip() for block in blocks]


def _opened_before(text: str, start: int, end: int) -> int:
    """The end of a block that was open at `start`; `start` if there was none."""
    closed = text.find(CLOSED, start, end)
    if closed < 0 or text.find(OPENED, start, closed) >= 0:
        return start
    after = closed + len(CLOSED)
    while after < end and text[after].isspace():
        after += 1
    return after
