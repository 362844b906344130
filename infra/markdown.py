"""Markdown from text that may hold anything."""

import re
from collections.abc import Mapping, Sequence

SPECIAL = re.compile(r"([\\`*_\[\]<>|~])")


def escaped(text: str) -> str:
    """Text that Markdown shows as it is: no markup, no table cell that ends early."""
    return SPECIAL.sub(r"\\\1", " ".join(text.split()))


def markdown_table(rows: Sequence[Mapping[str, str]], gap: str = "") -> str:
    """Rows of equal keys, the first column to the left and the others, after a `gap`, to the right."""
    lines = [[escaped(cell) for cell in cells] for cells in (rows[0], *(row.values() for row in rows))]
    spaced = [[first, *(f"{gap}{cell}" for cell in others)] for first, *others in lines]
    spaced.insert(1, [":---", *["---:"] * (len(rows[0]) - 1)])
    return "\n".join(f"| {' | '.join(line)} |" for line in spaced)
