"""Reading of training text: conversations and plain documents, with refusals that name the line.

Used by the process that prepares samples.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from infra.cached_folder import build_once
from infra.files import sha256_file
from infra.settings import cache_folder
from models.data import python_docs

PYTHON_DOCS = "python-docs"

_ROLES = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}


@dataclass(frozen=True)
class Message:
    """One turn; `role` is system, user, assistant or tool."""

    role: str
    content: str

    def as_dict(self) -> dict[str, str]:
        """The form that chat templates read."""
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True)
class Document:
    """One conversation (`messages`) or one plain text (one message without a role's meaning, `plain` True)."""

    place: str
    """Where it was read, for people: file and line."""
    messages: tuple[Message, ...]
    plain: bool

    @property
    def text(self) -> str:
        """The words alone, turns separated by a blank line."""
        return "\n\n".join(message.content for message in self.messages)

    @property
    def content_hash(self) -> str:
        """Identity of the content, whatever file it was read from."""
        turns = [[message.role, message.content.strip()] for message in self.messages]
        return hashlib.sha256(json.dumps([self.plain, turns]).encode()).hexdigest()


def source_hash(source: str) -> str:
    """Hash of the bytes that `read_documents` would read; raises ValueError for a source that is not there."""
    if source == PYTHON_DOCS:
        return python_docs.source_hash()
    path = _file(source)
    return hashlib.sha256(f"{path.suffix} {sha256_file(path)}".encode()).hexdigest()


def read_documents(source: str) -> Iterator[Document]:
    """Every document of `source` in its order, duplicates included.

    Raises:
        ValueError: missing file, unknown kind, broken JSON (with its line), a record without known keys, no document.
    """
    if source == PYTHON_DOCS:
        for place, text in python_docs.documents():
            yield _plain(place, text)
        return
    path = _file(source)
    count = 0
    for document in _jsonl(path) if path.suffix == ".jsonl" else _paragraphs(path):
        count += 1
        yield document
    if count == 0:
        raise ValueError(f"{path} is empty: data.source needs at least one document")


def _file(source: str) -> Path:
    path = Path(source).expanduser()
    if path.suffix not in {".jsonl", ".txt"}:
        raise ValueError(
            f"data.source {source!r} is of no known kind: use a .jsonl file of conversations, a .txt file with blank "
            f"lines between documents, or {PYTHON_DOCS!r}"
        )
    if "://" in source:
        return _fetched(source, path.suffix)
    if not path.is_file():
        raise ValueError(f"data.source {source!r}: there is no such file (looked in {Path.cwd()})")
    return path


def _fetched(url: str, suffix: str) -> Path:
    """A copy in the cache of what lies at an address that fsspec knows, s3:// for instance; new when that changes."""
    try:
        files, place = fsspec.core.url_to_fs(url)
        files.invalidate_cache()
        version = hashlib.sha256(f"{url} {files.ukey(place)}".encode()).hexdigest()[:32]
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(
            f"data.source {url!r} cannot be read ({error or type(error).__name__}): check address and credentials "
            "(AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)"
        ) from error
    folder = cache_folder() / "sources" / version
    build_once(folder, lambda aside: files.get_file(place, str(aside / f"source{suffix}")))
    return folder / f"source{suffix}"


def _plain(place: str, text: str) -> Document:
    return Document(place, (Message("text", text),), plain=True)


def _paragraphs(path: Path) -> Iterator[Document]:
    """Documents are separated by one or more blank lines."""
    block: list[str] = []
    start = 1
    for number, line in _lines(path):
        if line.strip():
            start = start if block else number
            block.append(line.rstrip("\n"))
        elif block:
            yield _plain(f"{path}:{start}", "\n".join(block))
            block = []
    if block:
        yield _plain(f"{path}:{start}", "\n".join(block))


def _jsonl(path: Path) -> Iterator[Document]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{place}: not valid JSON ({error.msg}, column {error.colno}): write one JSON object per line"
            ) from error
        yield _document(place, record)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open(encoding="utf-8") as file:
        try:
            yield from enumerate(file, start=1)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{path} is not UTF-8 text ({error.reason} near byte {error.start}): convert it"
            ) from error


def _document(place: str, record: Any) -> Document:
    if not isinstance(record, dict):
        raise ValueError(f"{place}: a {type(record).__name__}, not a JSON object with conversations, messages or text")
    if "conversations" in record:
        return Document(place, _turns(place, record["conversations"], "from", "value"), plain=False)
    if "messages" in record:
        return Document(place, _turns(place, record["messages"], "role", "content"), plain=False)
    if isinstance(record.get("text"), str):
        return _plain(place, record["text"])
    raise ValueError(
        f"{place}: no conversations, messages or text (text) in this record; its keys are {sorted(record)}. Rename the "
        "key, or convert the file"
    )


def _turns(place: str, turns: Any, role_key: str, content_key: str) -> tuple[Message, ...]:
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{place}: the conversation has no turns: leave the line out")
    messages = []
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, dict) or not isinstance(turn.get(content_key), str) or role_key not in turn:
            raise ValueError(f"{place}: turn {number} needs {role_key!r} and {content_key!r} (text); got {turn!r:.80}")
        role = _ROLES.get(str(turn[role_key]).lower())
        if role is None:
            raise ValueError(f"{place}: turn {number} has the role {turn[role_key]!r}; known are {sorted(_ROLES)}")
        messages.append(Message(role, turn[content_key]))
    return tuple(messages)
