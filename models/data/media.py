"""What a record holds beside text, and where: images, video and sound."""

import base64
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

IMAGE = "\ufffc"
"""Stands in a message's content for an image (Unicode's object replacement character)."""
Image = str | bytes
"""A path below `data.images`, a `data:` address, or the file itself."""

_MEDIA = {"image": "an image", "video": "a video", "audio": "sound"}
_BESIDE = "<image>"
"""Stands in a turn's text for the next of the images beside the turns (LLaVA's files)."""
_NOTE = re.compile(r"(audio|video)s?(_url)?$")
"""Keys beside turns that may only name a recording."""
_REFERENCE = re.compile(r"<\|?(image|video|audio|sound|speech)\b[^<>]*>", re.IGNORECASE)
"""What stands in a text for a medium beside it."""
_KEYS = ("image", "image_url", "url", "path", "bytes", "input_image")
"""Of a part, and inside it, in the order in which they are looked up."""


@dataclass(frozen=True)
class Prompt:
    """Token ids, and the files of the images that stand in them."""

    tokens: tuple[int, ...]
    images: tuple[Path, ...] = ()


def as_text(image: Image) -> str:
    """The image as a line of JSON can hold it."""
    return image if isinstance(image, str) else f"data:;base64,{base64.b64encode(image).decode()}"


def media_in(record: Mapping[str, Any], turns: Sequence[Mapping[str, Any]]) -> str:
    """Which media a record holds, and where, for a person; empty for text alone.

    Args:
        record: with everything beside its turns.
        turns: each with `content`, a text or a list of parts, and its `number`.
    """
    texts = [text for turn in turns for text in _texts(turn["content"])]
    if found := _beside_text(record, texts):
        return f"the record holds {found}"
    for turn in turns:
        parts = turn["content"] if isinstance(turn["content"], list) else []
        found = _beside_text(turn, _texts(turn["content"])) or next(filter(None, map(medium, parts)), "")
        if found:
            return f"turn {turn['number']} holds {found}"
    return ""


def medium(part: Any) -> str:
    """The medium of a part of a message; empty for text."""
    return _medium(part, {str(part.get("type"))}) if isinstance(part, dict) else ""


def _medium(held: Mapping[str, Any], names: set[str]) -> str:
    """The medium that one of `names`, or a key of `held` that has a value, stands for."""
    names = names | {key for key, value in held.items() if value}
    forms = ("{}", "{}s", "{}_url", "input_{}")
    return next((shown for name, shown in _MEDIA.items() if names & {form.format(name) for form in forms}), "")


def _beside_text(held: Mapping[str, Any], texts: Sequence[str]) -> str:
    """The medium of what lies beside turns, or beside a turn's content; empty for text, and for notes about it.

    A transcript may say where its recording lies (`audio: call-17.wav`) or of what kind it was (`type: image`).
    """
    refers = any(_REFERENCE.search(text) for text in texts)
    kept = {key: value for key, value in held.items() if refers or not (_NOTE.match(key) and _is_note(value))}
    return _medium(kept, set())


def _is_note(value: Any) -> bool:
    """Whether a value is a name, a number or a flag, and not the recording itself."""
    return isinstance(value, str | int | float) and not str(value).startswith("data:")


def _texts(content: Any) -> list[str]:
    parts = content if isinstance(content, list) else [content]
    texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
    return [text for text in texts if isinstance(text, str)]


def seen_turns(record: Mapping[str, Any], contents: Sequence[Any]) -> list[tuple[str, tuple[Image, ...]]] | None:
    """The turns' texts with `IMAGE` for every image, and these images; None where a medium is no image with a place.

    Args:
        record: the record that holds the turns, and perhaps images beside them.
        contents: the turns' contents: a text, or a list of parts.
    """
    beside = deque(_beside(record))
    turns, before = list[tuple[str, tuple[Image, ...]]](), len(beside)
    for content in contents:
        turn = _seen(content, beside)
        if turn is None:
            return None
        turns.append(turn)
    if beside and len(beside) == before and turns:
        # Nothing in the turns refers to them: they come first.
        text, own = turns[0]
        turns[0] = (IMAGE * len(beside) + text, (*beside, *own))
        beside.clear()
    return None if beside else turns


def _seen(content: Any, beside: deque[Image]) -> tuple[str, tuple[Image, ...]] | None:
    parts = content if isinstance(content, list) else [content or ""]
    text, images = "", list[Image]()
    for part in parts:
        if isinstance(part, str):
            said = part.replace(IMAGE, "")
            pieces = said.split(_BESIDE) if beside else [said]
            if len(pieces) - 1 > len(beside):
                return None
            images += [beside.popleft() for _ in pieces[1:]]
            text += IMAGE.join(pieces[:1] + [piece.removeprefix("\n") for piece in pieces[1:]])
        elif (found := medium(part)) == "":
            text += str(part.get("text")).replace(IMAGE, "")
        elif found != _MEDIA["image"]:
            return None
        else:
            image = _image(part)
            if image is None and beside:
                image = beside.popleft()
            if image is None:
                return None
            images.append(image)
            text += IMAGE
    return text, tuple(images)


def _beside(record: Mapping[str, Any]) -> list[Image]:
    found = record.get("images") or record.get("image") or []
    images = [_image(one) for one in (found if isinstance(found, list) else [found])]
    return [image for image in images if image is not None]


def _image(part: Any) -> Image | None:
    """The image that a part names or holds."""
    if isinstance(part, str | bytes):
        return part or None
    if not isinstance(part, dict):
        return None
    # Parquet's columns hold the bytes, and the name that the file once had.
    if isinstance(part.get("bytes"), bytes):
        return part["bytes"]
    return next(filter(None, (_image(part.get(key)) for key in _KEYS)), None)
