"""One turn of a conversation, in the form that templates read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from models.data.media import IMAGE, Image
from models.data.thinking import thinks


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
    cut: bool = False
    """Whether the answer was cut, for instance at a length limit: the target did not end it there."""

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
    def reasons(self) -> bool:
        """Whether it holds reasoning, apart or in its content."""
        return bool(self.reasoning.strip()) or thinks(self.content)

    @property
    def is_empty(self) -> bool:
        """Whether it says, thinks and calls nothing."""
        return not (self.content.strip() or self.reasoning.strip() or self.more.get("tool_calls"))


def sent_back(messages: Sequence[Message]) -> frozenset[int]:
    """The turns of answers that a client sent back without their reasoning, as far as this can be told.

    A request log holds the reasoning of the answer that was logged, perhaps also of the tool calls since the last
    question, and of no answer before these. A target that reasons did not generate such earlier answers as they stand.
    """
    answers = [turn for turn, message in enumerate(messages) if message.role == "assistant"]
    reasoned = [turn for turn in answers if messages[turn].reasons]
    asked = max((turn for turn, message in enumerate(messages) if message.role == "user"), default=-1)
    if not reasoned or reasoned[0] < asked or reasoned != answers[-len(reasoned) :]:
        return frozenset()
    return frozenset(answers[: -len(reasoned)])


def joined(texts: tuple[str, ...] | list[str]) -> str:
    """Several texts as one, as SGLang joins them for templates that read content as a text."""
    return " ".join(texts)


def _parts(content: str) -> list[dict[str, str]]:
    """A content with images as the list of parts that templates of multimodal targets read."""
    parts = list[dict[str, str]]()
    for number, text in enumerate(content.split(IMAGE)):
        parts += [{"type": "image"}] * (number > 0) + [{"type": "text", "text": text}] * bool(text)
    return parts
