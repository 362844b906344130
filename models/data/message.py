"""One turn of a conversation, in the form that templates read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from models.data.media import IMAGE, Image


@dataclass(frozen=True)
class Message:
    """One turn; `role` is system, user, assistant or tool."""

    role: str
    content: str
    """With `IMAGE` where one of `images` stands."""
    reasoning: str = ""
    """The assistant's reasoning, if it is separate from the content (`reasoning_content`)."""
    more: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Other keys that templates read: `tool_call_id`, `name`, `tool_calls`."""
    images: tuple[Image, ...] = ()
    texts: tuple[str, ...] = ()
    """The content's parts, if it was given as several texts."""
    learned: bool = True
    """Whether the draft may learn this answer."""

    def as_dict(self) -> dict[str, Any]:
        """The message as OpenAI's API has it; see ChatTemplate for what templates get of it."""
        thought = {"reasoning_content": self.reasoning} if self.reasoning else {}
        content: Any = self.content
        if self.images:
            content = _parts(self.content)
        elif self.texts and joined(self.texts) == self.content:  # the content may have lost its reasoning since
            content = [{"type": "text", "text": text} for text in self.texts]
        return {"role": self.role, "content": content, **thought, **self.more}

    @property
    def tools_called(self) -> tuple[str, ...]:
        """Names of the functions that this turn calls."""
        return tuple(call["function"]["name"] for call in self.more.get("tool_calls", ()))

    @property
    def is_empty(self) -> bool:
        """Whether it says, thinks and calls nothing."""
        return not (self.content.strip() or self.reasoning.strip() or self.more.get("tool_calls"))


def joined(texts: tuple[str, ...] | list[str]) -> str:
    """Several texts as one, as SGLang joins them for templates that read content as a text."""
    return " ".join(texts)


def _parts(content: str) -> list[dict[str, str]]:
    """A content with images as the list of parts that templates of multimodal targets read."""
    parts = list[dict[str, str]]()
    for number, text in enumerate(content.split(IMAGE)):
        parts += [{"type": "image"}] * (number > 0) + [{"type": "text", "text": text}] * bool(text)
    return parts
