"""Text of others on a terminal."""

import re

CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def visible(text: str) -> str:
    """The text with its control characters as `\\x1b`, except newlines and tabs.

    Training text may hold them, and a terminal that obeyed would clear itself, or write over what stands there.
    """
    return CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
