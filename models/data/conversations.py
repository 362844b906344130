"""Training text as documents: conversations, plain text, and tokens."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infra.refusal import Refusal
from models.config.data import LIVE, DataConfig
from models.data import python_docs
from models.data.media import IMAGE, Image, as_text, media_in, medium, seen_turns
from models.data.reading import Row, converted, read_rows
from models.data.sources import find_source

PYTHON_DOCS = "python-docs"

_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}
MAX_DEPTH = 64
"""Nesting levels of tools and their arguments."""
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
TOLD_APART = 8
"""Words that tell what two dialogues are about; "Hi" begins many."""
_TEMPLATE_KEYS = ("tool_call_id", "name")
"""Keys of a turn that templates get unchanged."""


@dataclass(frozen=True)
class Message:
    """One turn; `role` is system, user, assistant or tool."""

    role: str
    content: str
    """With `IMAGE` where one of `images` stands."""
    reasoning: str = ""
    """The assistant's reasoning, if it is separate from the content (`reasoning_content`)."""
    more: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Other keys that templates read: `tool_calls`, `tool_call_id`, `name`."""
    images: tuple[Image, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The message as chat templates read it."""
        thought = {"reasoning_content": self.reasoning} if self.reasoning else {}
        content = _parts(self.content) if self.images else self.content
        return {"role": self.role, "content": content, **thought, **self.more}

    @property
    def tools_called(self) -> tuple[str, ...]:
        """Names of the functions that this turn calls."""
        return tuple(call["function"]["name"] for call in self.more.get("tool_calls", ()))


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
        """Hash of the questions that a dialogue begins with, at least `TOLD_APART` words of them.

        Several answers to one question have it in common, and the requests of one dialogue, each of which holds all
        turns before it. Of plain text, tokens alone and dialogues with fewer words it is the content's.
        """
        words, asked = 0, list[str]()
        for message in () if self.plain else self.messages:
            if message.role == "user":
                asked.append(" ".join(message.content.split()).casefold())
                words += len(message.content.split())
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
            shown = [one if isinstance(one, str) else hashlib.sha256(one).hexdigest() for one in message.images]
            turns.append([message.role, normalize(message.content), *more, *([shown] if shown else [])])
        parts = [self.plain, turns, *([list(self.tools)] if self.tools else []), *([self.media] if self.media else [])]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


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

    Raises Refusal at the end where they are more than `data.max_broken_share` of all.
    """
    return converted(read_records(config.source), as_document, config.max_broken_share, broken)


def as_document(place: str, record: Any) -> Document:
    """Convert one record. Raises Refusal, with the place, if it has no known keys."""
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise Refusal(f"{place}: write a JSON object with conversations, messages or text in place of this {kind}")
    tokens, media = _generated(place, record), media_in(record)
    if record.get("conversations") is not None:
        turns = _turns(place, record["conversations"], "from", "value")
        turns = (*_system(record), *(_shown(record, "conversations", "value", turns) if media else turns))
        return Document(place, turns, plain=False, tools=_tools(place, record), tokens=tokens, media=media)
    if record.get("messages") is not None:
        turns = _turns(place, record["messages"], "role", "content")
        turns = _shown(record, "messages", "content", turns) if media else turns
        return Document(place, turns, plain=False, tools=_tools(place, record), tokens=tokens, media=media)
    if record.get("input_ids") is not None:
        return Document(place, (), plain=True, tokens=(_tokens(place, record),))
    if isinstance(record.get("text"), str):
        return Document(place, (Message("text", record["text"]),), plain=True, tokens=tokens, media=media)
    raise Refusal(
        f"{place}: this record has none of the keys conversations, messages, text and input_ids; its keys are "
        f"{sorted(record)}. Rename the key, or convert the file"
    )


def _system(record: Mapping[str, Any]) -> tuple[Message, ...]:
    """ShareGPT's files have the system prompt beside the turns."""
    prompt = record.get("system")
    return (Message("system", prompt),) if isinstance(prompt, str) and prompt.strip() else ()


def _tools(place: str, record: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    tools = _parsed(record.get("tools")) or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Refusal(
            f"{place}: tools is not a list of JSON objects (or the JSON text of one): correct it, or leave the key out"
        )
    for tool in tools:
        _check_json(f"{place}: tools", tool)
    return tuple(_present(tool) for tool in tools)


def _turns(place: str, turns: Any, role_key: str, content_key: str) -> tuple[Message, ...]:
    if not isinstance(turns, list) or not turns:
        raise Refusal(f"{place}: the conversation has no turns: leave the line out")
    messages = []
    for number, turn in enumerate(turns, start=1):
        calls = _calls(f"{place}: turn {number}", turn) if isinstance(turn, dict) else []
        content = _text(turn.get(content_key)) if isinstance(turn, dict) else None
        if content is None and calls:
            content = ""  # as in OpenAI's API
        if content == "" and turn.get("refusal"):
            content = None
        if content is None or role_key not in turn:
            raise Refusal(
                f"{place}: turn {number} needs {role_key!r} and {content_key!r} (text): correct it; got {turn!r:.80}"
            )
        role = _ROLES.get(str(turn[role_key]).lower())
        if role is None:
            raise Refusal(
                f"{place}: turn {number} has the role {turn[role_key]!r}; known are {sorted(_ROLES)}: rename it"
            )
        more = {key: turn[key] for key in _TEMPLATE_KEYS if turn.get(key) is not None}
        if not all(isinstance(value, str) for value in more.values()):
            raise Refusal(f"{place}: turn {number}: {' and '.join(more)} must be text: correct or remove it")
        thoughts = [turn[key] for key in _REASONING_KEYS if isinstance(turn.get(key), str)]
        reasoning = next(filter(None, thoughts), "") if role == "assistant" else ""
        messages.append(Message(role, content, reasoning, more | ({"tool_calls": calls} if calls else {})))
    return tuple(messages)


def _shown(record: Mapping[str, Any], key: str, content_key: str, turns: tuple[Message, ...]) -> tuple[Message, ...]:
    """The turns with their images; unchanged where a target could not be shown all of the record's media."""
    seen = seen_turns(record, [turn.get(content_key) for turn in record[key]])
    if seen is None or any(images and turn.role == "assistant" for turn, (_, images) in zip(turns, seen, strict=True)):
        return turns
    if not any(images for _, images in seen):
        return turns
    pairs = zip(turns, seen, strict=True)
    return tuple(replace(turn, content=text, images=images) if images else turn for turn, (text, images) in pairs)


def _parts(content: str) -> list[dict[str, str]]:
    """A content with images as the list of parts that templates of multimodal targets read."""
    parts = list[dict[str, str]]()
    for number, text in enumerate(content.split(IMAGE)):
        parts += [{"type": "image"}] * (number > 0) + [{"type": "text", "text": text}] * bool(text)
    return parts


def _text(content: Any) -> str | None:
    """A turn's text: a string, or parts that are text or media."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        return None
    texts = [part.get("text") if isinstance(part, dict) else None for part in content if not medium(part)]
    return "\n".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else None


def _calls(place: str, turn: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tool calls with their arguments as an object: serving engines parse them before they render the template."""
    calls: list[dict[str, Any]] = []
    old = _parsed(turn.get("function_call"))  # of OpenAI's API before tools
    given = _parsed(turn.get("tool_calls")) or ([old] if old else [])
    if not isinstance(given, list):
        raise Refusal(f"{place}: tool_calls is not a list: {given!r:.80}. Correct it, or leave the key out")
    for call in given:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Refusal(f"{place} has a tool call without a function's name: {call!r:.80}. Correct or remove it")
        arguments = _parsed(function.get("arguments")) or {}
        kept = {key: call[key] for key in ("id",) if call.get(key) is not None}
        _check_json(f"{place}: tool_calls", [arguments, kept])
        calls.append({"type": "function", **kept, "function": {"name": function["name"], "arguments": arguments}})
    return calls


def _parsed(value: Any) -> Any:
    """The value of JSON text, anything else unchanged; Parquet files keep objects of many shapes as text."""
    if not isinstance(value, str):
        return _present(value)
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _check_json(place: str, value: Any, depth: int = 0) -> None:
    """Raise Refusal for values that templates cannot render: too deep, or (in Parquet files) not JSON."""
    if depth > MAX_DEPTH:
        raise Refusal(f"{place}: nested more than {MAX_DEPTH} levels deep: flatten or remove it")
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            _check_json(place, part, depth + 1)
    elif not (value is None or isinstance(value, str | int | float)):
        raise Refusal(f"{place}: holds a {type(value).__name__}, which JSON has not: write it as text")


def _present(value: Any) -> Any:
    """The value without the nulls that Parquet adds to objects of several shapes."""
    if isinstance(value, dict):
        return {key: _present(item) for key, item in value.items() if item is not None}
    return [_present(item) for item in value] if isinstance(value, list) else value


def _generated(place: str, record: Mapping[str, Any]) -> tuple[Tokens, ...]:
    """What regeneration adds to a record: the tokens that the target was asked and answered."""
    samples = record.get("generated")
    if not isinstance(samples, list) or not all(isinstance(one, dict) and "input_ids" in one for one in samples):
        return ()
    return tuple(
        replace(_tokens(place, sample), room=int(sample.get("room", 0)), images=tuple(sample.get("images", ())))
        for sample in samples
    )


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
