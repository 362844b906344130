"""Which tokens of a conversation the target would have generated, and which of them are reasoning."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from models.data.chat_template import ChatTemplate, UnrenderableError
from models.data.conversations import Document
from models.data.images import ImageShelf
from models.data.rendering import Rendering, Turns, render_conversation, squeezed
from models.data.thinking import Span, thinking_spans, thinks

UNFINISHED = "\ufffd"
"""What a part of a character is decoded to."""
LONGEST_CHARACTER = 4
"""Bytes in UTF-8, so tokens at most."""


@dataclass(frozen=True)
class MaskedTokens:
    """Token ids `[T]` int32 of a conversation, and the mask `[T]` bool of what the target generates."""

    ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    turns: int = 0
    """Answers in the mask."""
    thinking: bool = False
    """Whether the answers hold reasoning, masked or not."""
    reasoning_dropped: bool = False
    """Whether the conversation holds reasoning that the chat template has no place for."""
    images: tuple[str, ...] = ()
    """Names of the images that stand in it, in order."""


def tokenize_conversation(
    template: ChatTemplate,
    document: Document,
    turns: Turns = "all",
    *,
    mask_thinking: bool = False,
    shelf: ImageShelf | None = None,
) -> list[MaskedTokens]:
    """Tokens of a conversation and the mask over its answers, each with its end of turn.

    There are several where the chat template renders history in another way than answers (see models.data.rendering),
    none without an answer. `mask_thinking` takes reasoning out of the masks; `shelf` reads and keeps the images.

    Raises UnrenderableError: the template refuses the conversation, or drops or changes an answer.
    """
    renderings = render_conversation(template, document, turns)
    return [_tokenize(template, rendering, document, mask_thinking, shelf) for rendering in renderings]


def _tokenize(
    template: ChatTemplate, rendering: Rendering, document: Document, mask_thinking: bool, shelf: ImageShelf | None
) -> MaskedTokens:
    text, spans, names = rendering.text, rendering.spans, ()
    shown = [image for message in document.messages[: rendering.last + 1] for image in message.images]
    if shelf is not None and shown:
        try:
            text, spans, names = shelf.expand(text, spans, shown)
        except UnrenderableError as error:
            raise UnrenderableError(f"{document.place}: {error}") from error
    ids, offsets = _encode(template, text, spans)
    mask = _covered(offsets, spans)
    generated: Any = template.tokenizer.decode(ids[mask].tolist(), skip_special_tokens=False)
    if squeezed(generated) != squeezed("".join(text[start:end] for start, end in spans)):
        raise UnrenderableError(
            f"{document.place}: the tokenizer changes what the assistant said ({generated!r:.60}): leave the "
            "conversation out"
        )
    if mask_thinking:
        mask = _covered(offsets, [rest for span in spans for rest in answers_in(text, span, document)])
    return MaskedTokens(ids, mask, rendering.turns, rendering.thinking, rendering.reasoning_dropped, names)


def _encode(template: ChatTemplate, text: str, spans: Sequence[Span]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Token ids `[T]` and the characters `[T, 2]` that each covers; no token lies across an edge of a span.

    A server tokenizes a prompt before its answer exists, and so is the prompt of the last span here: the whole text
    may have other tokens around the boundary.
    """
    cuts = set() if template.adds_space else {spans[-1][0]}
    ids, offsets = _encode_pieces(template.tokenizer, text, cuts)
    starts, ends = offsets.T
    torn = {edge for span in spans for edge in span if ((starts < edge) & (ends > edge)).any()}
    return _encode_pieces(template.tokenizer, text, cuts | torn) if torn else (ids, offsets)


def _encode_pieces(
    tokenizer: PreTrainedTokenizerBase, text: str, cuts: set[int]
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    pieces = list(pairwise([0, *sorted(cuts), len(text)]))
    encoded = [_encode_whole(tokenizer, text[start:end]) for start, end in pieces]
    moved = [offsets + start for (start, _), (_, offsets) in zip(pieces, encoded, strict=True)]
    return np.concatenate([ids for ids, _ in encoded]), np.concatenate(moved)


def _encode_whole(tokenizer: Any, text: str) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return (
        np.array(encoded["input_ids"], dtype=np.int32),
        np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2),
    )


def _covered(offsets: NDArray[np.int64], spans: Sequence[Span]) -> NDArray[np.bool_]:
    """Tokens that start inside a span. `char_to_token` would miss some where several tokens share a character."""
    starts, ends = offsets.T
    mask = np.zeros(len(offsets), dtype=bool)
    for start, end in spans:
        mask |= (starts >= start) & (starts < end) & (ends > start)
    return mask


def mask_generated(
    tokenizer: PreTrainedTokenizerBase, tokens: MaskedTokens, document: Document, *, mask_thinking: bool
) -> MaskedTokens:
    """Tokens that the target itself generated in `document`; `mask_thinking`: without their reasoning."""
    ids, mask = tokens.ids, tokens.mask
    runs = runs_of(mask)
    answers = [str(tokenizer.decode(ids[start:end].tolist(), skip_special_tokens=False)) for start, end in runs]
    shown = squeezed("".join(answers))
    thoughts = [message.reasoning for message in document.messages if message.reasoning]
    thinking = any(map(thinks, answers)) or any(squeezed(thought) in shown for thought in thoughts)
    if mask_thinking and thinking:
        text, offsets = _decode(tokenizer, ids.tolist())
        spans = [(int(offsets[first, 0]), int(offsets[end - 1, 1])) for first, end in runs]
        mask = mask & _covered(offsets, [rest for span in spans for rest in answers_in(text, span, document)])
    return MaskedTokens(ids, mask, len(runs), thinking, images=tokens.images)


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> tuple[str, NDArray[np.int64]]:
    """The text of tokens, and the characters `[T, 2]` of each; tokens that share a character have the same."""
    known = {token: str(tokenizer.decode([token], skip_special_tokens=False)) for token in set(ids)}
    text, offsets, held = "", list[Span](), list[int]()
    for place, token in enumerate(ids, start=1):
        held.append(token)
        piece = known[token] if len(held) == 1 else str(tokenizer.decode(held, skip_special_tokens=False))
        if UNFINISHED not in piece or len(held) == LONGEST_CHARACTER or place == len(ids):
            offsets += [(len(text), len(text) + len(piece))] * len(held)
            text, held = text + piece, []
    return text, np.array(offsets, dtype=np.int64).reshape(-1, 2)


def runs_of(mask: NDArray[np.bool_]) -> list[Span]:
    """First and one past the last index of every run of True in `mask` `[T]`."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]


def answers_in(text: str, span: Span, document: Document) -> list[Span]:
    """The parts of a span of `text` without reasoning: `<think>` blocks, and what the messages call reasoning."""
    blocks = thinking_spans(text, span)
    for message in document.messages:
        thought = message.reasoning.strip()
        first = text.find(thought, *span) if thought else -1
        if first >= 0:
            blocks.append((first, first + len(thought)))
    start, parts = span[0], []
    for first, end in sorted(blocks):
        if first > start:
            parts.append((start, first))
        start = max(start, end)
    return [*parts, *([(start, span[1])] if start < span[1] else [])]
