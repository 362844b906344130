"""Rendered conversations read back: their turns from token ids, as far as special tokens and roles tell them apart."""

from collections.abc import Sequence
from typing import Any

from models.data.benchmark_prompts import words_of
from models.data.conversations import Document
from models.data.message import Message
from models.data.turns import ROLES

MISTRAL_ROLES = {"[INST]": "user", "[/INST]": "assistant"}
"""Of tokens that name no role."""
GLM_SWITCH = "/nothink"
"""What GLM-4.5's template adds to questions where reasoning is off."""


def read_back(tokenizer: Any, tokens: Sequence[int]) -> Document:
    """The conversation that was rendered as `tokens`: good enough to compare what is asked, not to render it again.

    A turn begins at a token that names its role (`<|user|>`), or at a role alone in the first line after a special
    token (`<|im_start|>user`). Text without roles is one question, and text before the first role a system prompt.
    """
    added, piece = tokenizer.added_tokens_decoder, list[int]()
    turns: list[tuple[str, list[str]]] = [("", [])]
    for token in (*tokens, None):
        mark = added.get(token)
        role = _role_of(mark.content) if mark is not None else None
        if token is not None and role is None and not (mark is not None and mark.special):
            piece.append(token)
            continue
        text, piece = str(tokenizer.decode(piece, skip_special_tokens=False)), []
        first, _, rest = text.partition("\n")
        if (named := ROLES.get(first.strip().lower())) is not None:
            turns.append((named, [rest]))
        else:
            turns[-1][1].append(text)
        if role is not None:
            turns.append((role, []))
    before = "system" if len(turns) > 1 else "user"
    messages = (Message(role or before, "".join(texts).strip().removesuffix(GLM_SWITCH)) for role, texts in turns)
    return Document("", tuple(message for message in messages if message.content), plain=False)


def _role_of(mark: str) -> str | None:
    """The role that a special token names, of those who ask and answer; None: it names none."""
    roles = (ROLES.get(word) for word in words_of(mark))
    return next((role for role in roles if role not in (None, "tool")), MISTRAL_ROLES.get(mark))
