"""Training text as documents: conversations, plain text, and tokens."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infra.refusal import Refusal
from models.config.data import LIVE, NO_TEMPLATE, DataConfig
from models.data import python_docs
from models.data.media import Image, as_text, media_in
from models.data.message import Message
from models.data.reading import Row, converted, read_rows
from models.data.sources import find_source
from models.data.tools import tools_of
from models.data.turns import has_turns, messages_of, turns_of

PYTHON_DOCS = "python-docs"

TOLD_APART = 8
"""Words that tell what two dialogues are about; "Hi" begins many."""


@dataclass(frozen=True)
class Tokens:
    """Token ids `[T]` int32 and `loss_mask` `[T]` bool of a document."""

    ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    tokenizer_hash: str | None
    """Hash of the tokenizer that made them, if the record states it."""
    room: int = 0
    """Of a prompt that is answered while it is captured: most tokens of the answer."""
    images: tuple[Image, ...] = ()
    """Those that stand in it, in order."""


@dataclass(frozen=True)
class Document:
    """A conversation (`messages`), a plain text (one message whose role is ignored, `plain` is True), or tokens.

    Regenerated documents have both, messages and the tokens that became of them.
    """

    place: str
    """File and line, for messages."""
    messages: tuple[Message, ...]
    plain: bool
    tools: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)
    """Tools that the assistant may call, as templates read them."""
    tokens: tuple[Tokens, ...] = ()
    """Its samples, if it is tokenized."""
    media: str = ""
    """What it holds beside text, and where, for a person; empty for text alone."""

    @property
    def kind(self) -> str:
        """What it is, for people."""
        if not self.plain:
            return "conversation"
        return "token record" if self.tokens else "plain text"

    @property
    def images(self) -> tuple[Image, ...]:
        """All images in their order; none where a medium cannot be shown to a target (video, sound, no address)."""
        return tuple(image for message in self.messages for image in message.images)

    @property
    def text(self) -> str:
        """The text of all turns, separated by blank lines."""
        return "\n\n".join(message.content for message in self.messages)

    @property
    def opening(self) -> tuple[str, ...]:
        """What it asks before its first answer: the user's turns there; of plain text, the text."""
        first = [message.role == "assistant" and turn > 0 for turn, message in enumerate(self.messages)]
        before = self.messages[: first.index(True)] if True in first else self.messages
        return tuple(message.content for message in before if self.plain or message.role == "user")

    @property
    def dialogue_hash(self) -> str:
        """Hash of the questions that a dialogue begins with, at least `TOLD_APART` words or an image of them.

        Several answers to one question have it in common, and the requests of one dialogue, each of which holds all
        turns before it. System prompts count without digits: many tell the time. Of plain text, tokens alone and
        dialogues with fewer words it is the content's.
        """
        words, asked = 0, list[Any]()
        # Of regenerated dialogues the tokens have them.
        first = [image for part in self.tokens[:1] for image in part.images[:1]]
        for message in () if self.plain else self.messages:
            text = " ".join(message.content.split()).casefold()
            if message.role == "system":
                asked.append(re.sub(r"\d", "", text))
            elif message.role == "user":
                images = _names(message.images or first)
                asked.append([text, *images])
                words += len(text.split()) + TOLD_APART * len(images)
            if words >= TOLD_APART:
                return hashlib.sha256(json.dumps(asked).encode()).hexdigest()
        return self.content_hash

    @property
    def content_hash(self) -> str:
        """Hash of the content; does not depend on the file."""
        if self.tokens:
            parts = (
                part.ids.tobytes() + part.loss_mask.tobytes() + "".join(map(as_text, part.images)).encode()
                for part in self.tokens
            )
            return hashlib.sha256(b"".join(parts)).hexdigest()
        return self._hash(str.strip)

    @property
    def wording_hash(self) -> str:
        """Hash of the words; ignores case and white space."""
        return self.content_hash if self.tokens else self._hash(lambda text: " ".join(text.split()).casefold())

    def _hash(self, normalize: Callable[[str], str]) -> str:
        turns: list[Any] = []
        for message in self.messages:
            more = [normalize(message.reasoning), dict(message.more)] if message.reasoning or message.more else []
            shown = _names(message.images)
            skipped = [] if message.learned else ["not learned"]
            turns.append([message.role, normalize(message.content), *more, *([shown] if shown else []), *skipped])
        parts = [self.plain, turns, *([list(self.tools)] if self.tools else []), *([self.media] if self.media else [])]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _names(images: Sequence[Image]) -> list[str]:
    """Addresses of images, or hashes of what was given whole."""
    return [one if isinstance(one, str) else hashlib.sha256(one).hexdigest() for one in images]


def source_hash(source: str) -> str:
    """Hash of what `read_documents` reads. Raises Refusal for a missing source."""
    return python_docs.source_hash() if source == PYTHON_DOCS else find_source(source).hash


def source_revision(source: str) -> str | None:
    """The commit of a dataset of the Hub; None for any other source."""
    return None if source in (PYTHON_DOCS, LIVE) else find_source(source).revision


def read_records(source: str) -> Iterator[Row]:
    """Every record of `source`, unconverted, with its place."""
    if source == PYTHON_DOCS:
        yield from ((place, {"text": text}) for place, text in python_docs.documents())
        return
    count = 0
    for row in read_rows(find_source(source)):
        count += 1
        yield row
    if count == 0:
        raise Refusal(f"{source} is empty: data.source needs at least one document, so add one")


def read_documents(source: str) -> Iterator[Document]:
    """Every document of `source` in order, including duplicates.

    Raises Refusal for a source that is missing, empty or of an unknown kind, and with their lines for broken records.
    """
    return converted(read_records(source), as_document)


def training_documents(config: DataConfig, broken: list[str] | None = None) -> Iterator[Document]:
    """`read_documents` without broken records, whose places and reasons are added to `broken`.

    Records of another kind than the first one are broken, too: tokens beside text, and under a chat template plain text
    beside conversations. Raises Refusal at the end where they are more than `data.max_broken_share` of all.
    """
    first: Document | None = None

    def as_the_first(place: str, record: Any) -> Document:
        nonlocal first
        document = as_document(place, record)
        first = first or document
        other_turns = document.plain != first.plain and config.chat_template != NO_TEMPLATE
        if other_turns or bool(document.tokens) != bool(first.tokens):
            raise Refusal(
                f"{place}: a {document.kind}, and the first record ({first.place}) is a {first.kind}: make two sources "
                "of them, or leave the line out"
            )
        return document

    return converted(read_records(config.source), as_the_first, config.max_broken_share, broken)


def as_document(place: str, record: Any) -> Document:
    """Convert one record. Raises Refusal, with the place, if it has no known keys."""
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise Refusal(f"{place}: write a JSON object with conversations, messages or text in place of this {kind}")
    tokens, turns = _generated(place, record), turns_of(place, record)
    media = media_in(record, turns)
    if turns:
        messages = messages_of(place, record, turns, media)
        return Document(place, messages, plain=False, tools=tools_of(place, record), tokens=tokens, media=media)
    if record.get("input_ids") is not None:
        return Document(place, (), plain=True, tokens=(_tokens(place, record),))
    if isinstance(record.get("text"), str):
        return Document(place, (Message("text", record["text"]),), plain=True, tokens=tokens, media=media)
    if has_turns(record):
        raise Refusal(f"{place}: the conversation has no turns: leave the line out")
    raise Refusal(
        f"{place}: this record has none of the keys conversations, messages, text and input_ids; its keys are "
        f"{sorted(record)}. Rename the key, or convert the file"
    )


def _generated(place: str, record: Mapping[str, Any]) -> tuple[Tokens, ...]:
    """What regeneration adds to a record: the tokens that the target was asked and answered."""
    samples = record.get("generated")
    if not isinstance(samples, list) or not all(isinstance(one, dict) and "input_ids" in one for one in samples):
        return ()
    return tuple(_generated_sample(place, sample) for sample in samples)


def _generated_sample(place: str, sample: Mapping[str, Any]) -> Tokens:
    room, images = sample.get("room", 0), sample.get("images", [])
    if type(room) is not int or not isinstance(images, list) or not all(isinstance(one, str | bytes) for one in images):
        raise Refusal(
            f"{place}: a sample of `generated` needs a whole number as room and a list of addresses as images: correct "
            "the record, or leave `generated` out"
        )
    return replace(_tokens(place, sample), room=room, images=tuple(images))


def _tokens(place: str, record: Mapping[str, Any]) -> Tokens:
    ids, mask = record["input_ids"], record.get("loss_mask")
    if not isinstance(mask, list) or not isinstance(ids, list) or len(ids) != len(mask):
        raise Refusal(
            f"{place}: input_ids need a loss_mask of the same length, 1 where the target would generate the token: add "
            "it"
        )
    if not all(type(token) is int and 0 <= token < 2**31 for token in ids) or not all(flag in (0, 1) for flag in mask):
        raise Refusal(
            f"{place}: input_ids are whole numbers from 0, and loss_mask holds 0 and 1 alone: correct the record"
        )
    stated = record.get("tokenizer_hash")
    return Tokens(np.array(ids, dtype=np.int32), np.array(mask, dtype=bool), None if stated is None else str(stated))
