"""Which tokens of a conversation the target would have generated, and which of them are reasoning.

Reasoning is `<think>...</think>` in an assistant's text. A template may open the block in the prompt; the text then
begins inside it and only contains its end.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from infra.refusal import Refusal
from models.data.conversations import Document, Message


class UnrenderableError(Refusal):
    """The chat template cannot make a sample of this conversation; it may of others."""


TEMPLATE_FAULTS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError, ArithmeticError)
"""Raised by templates for conversations that they were not written for."""

Turns = Literal["all", "last"]
Messages = Sequence[dict[str, Any]]
Render = Callable[..., str]
"""Renders messages with the chat template; `add_generation_prompt=True` adds the prompt of an answer."""
_PLACEHOLDER = "\ue000"
"""Placeholder of an answer: a private-use character, which no template changes."""
Span = tuple[int, int]
"""First character, and one past the last."""
OPENED, CLOSED = "<think>", "</think>"
_BLOCK = re.compile(r"<think>.*?(?:</think>\s*|\Z)", re.DOTALL)
"""A block without an end extends to the end of the text."""
_BEGUN = re.compile(r"<think>\s*(?!\s|</think>)\S")
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


def marks_generation(template: str) -> bool:
    """Whether a chat template marks assistant text with `{% generation %}`."""
    return _GENERATION_TAG.search(template) is not None


def tokenize_conversation(
    tokenizer: PreTrainedTokenizerBase,
    document: Document,
    template: str,
    turns: Turns = "all",
    *,
    mask_thinking: bool = False,
) -> tuple[list[int], NDArray[np.bool_]]:
    """Token ids of a whole conversation and the mask over its assistant tokens, including end-of-turn markers.

    The mask comes from the template's generation tags, or else from the difference between the conversation and the
    prompt of each assistant turn. It covers all assistant turns or the last; `mask_thinking` leaves out reasoning.

    Raises UnrenderableError: the template refuses the conversation, or drops or changes an answer.
    """
    answers = [turn for turn, message in enumerate(document.messages) if message.role == "assistant"]
    learned = answers if turns == "all" else answers[-1:]
    spans_of = _by_tags if marks_generation(_template_of(tokenizer, document, template)) else _by_difference
    try:
        text, spans = spans_of(tokenizer, document, learned)
    except UnrenderableError:
        raise
    except TEMPLATE_FAULTS as error:
        raise UnrenderableError(
            f"{document.place}: the chat template refuses this ({error}): correct the roles or leave it out"
        ) from error
    if mask_thinking:
        spans = [rest for span in spans for rest in _answers(text, span, document)]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids: Any = encoded["input_ids"]
    mask = _covered(np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2), spans)
    _verify(tokenizer, ids, mask, document, learned)
    return ids, mask


def _template_of(tokenizer: Any, document: Document, template: str) -> str:
    """Some tokenizers have a separate template for conversations with tools."""
    return tokenizer.get_chat_template(tools=list(document.tools)) if document.tools else template


def _covered(offsets: NDArray[np.int64], spans: list[Span]) -> NDArray[np.bool_]:
    """Tokens that start inside a span. `char_to_token` would miss some where several tokens share a character."""
    starts, ends = offsets.T
    mask = np.zeros(len(offsets), dtype=bool)
    for start, end in spans:
        mask |= (starts >= start) & (starts < end) & (ends > start)
    return mask


def _by_tags(tokenizer: Any, document: Document, learned: list[int]) -> tuple[str, list[Span]]:
    messages, tools = [message.as_dict() for message in document.messages], [dict(tool) for tool in document.tools]

    def render(part: Messages) -> tuple[str, list[Span]]:
        rendered: Any = render_jinja_template(
            conversations=[list(part)],
            tools=tools or None,  # type: ignore[arg-type]
            chat_template=tokenizer.get_chat_template(tools=tools or None),
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )
        (text,), (spans,) = rendered
        return text, spans

    text, spans = render(messages)
    before = messages[: learned[0]] if learned else []
    earlier = sum(message["role"] == "assistant" for message in before)
    return text, spans[len(render(before)[1]) :] if earlier else spans


def _by_difference(tokenizer: Any, document: Document, learned: list[int]) -> tuple[str, list[Span]]:
    messages, tools = [message.as_dict() for message in document.messages], list(document.tools) or None

    def render(part: Messages, **options: bool) -> str:
        return tokenizer.apply_chat_template(list(part), tools=tools, tokenize=False, **options)

    text = render(messages)
    return text, [_checked_span(render, messages, turn, text, document.place) for turn in learned]


def _checked_span(render: Render, messages: Messages, turn: int, text: str, place: str) -> Span:
    """Characters of `text` that the target generates in one assistant turn."""
    span = _span_as_last(render, messages, turn, text) or _span_inside(render, messages, turn, text)
    if span is None or _squeezed(_answer(messages[turn]["content"])) not in _squeezed(text[slice(*span)]):
        raise UnrenderableError(
            f"{place}: the chat template renders turn {turn + 1} differently inside the conversation, so its tokens "
            "cannot be found: leave the conversation out, use a template with {% generation %} tags, or try "
            "data.thinking=strip"
        )
    return span


def _span_as_last(render: Render, messages: Messages, turn: int, text: str) -> Span | None:
    """The turn's span if it is rendered as at the end of a conversation: everything after its prompt."""
    if turn == 0:
        return None
    prompt, whole = render(messages[:turn], add_generation_prompt=True), render(messages[: turn + 1]).rstrip()
    return (len(prompt), len(whole)) if whole.startswith(prompt) and text.startswith(whole) else None


def _span_inside(render: Render, messages: Messages, turn: int, text: str) -> Span | None:
    """The turn's span inside the conversation, located by rendering a placeholder in its place.

    Templates may render a turn differently when another follows (Qwen3's thinking block). What a template puts after
    the last turn is the end-of-turn marker.
    """
    asked, marked = messages[:turn], {**messages[turn], "content": _PLACEHOLDER}
    before, placeholder, after = render([*asked, marked, *messages[turn + 1 :]]).partition(_PLACEHOLDER)
    _, _, marker = render([*asked, marked]).rpartition(_PLACEHOLDER)
    marker = marker.rstrip()
    if not placeholder or not text.endswith(after) or not after.startswith(marker):
        return None
    end = len(text) - len(after) + len(marker)
    # A greeting has no prompt, and templates refuse to render nothing: the span starts at its words.
    start = _opening(render, asked, before) if asked else len(before)
    return (start, end) if start is not None and text.startswith(before[:start]) else None


def _opening(render: Render, asked: Messages, before: str) -> int | None:
    """Position in `before`, the text before an answer, at which the target starts to generate."""
    prompt = render(asked, add_generation_prompt=True)
    shared = _shared(prompt, before)
    if shared == len(prompt):
        return shared
    history = render(asked)
    if shared >= len(history):
        # The prompt ends with the opening of a thinking block, which `before` does not have.
        return shared
    opening = prompt[_shared(prompt, history) :]
    start = before.rfind(opening) if opening else -1
    return start + len(opening) if start >= 0 else None


def _shared(one: str, other: str) -> int:
    """Length of the common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


def _answers(text: str, span: Span, document: Document) -> list[Span]:
    """The parts of a span without reasoning."""
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


def _answer(content: str) -> str:
    """What every template renders of an assistant's turn: some drop thinking from earlier turns."""
    return without_thinking(content).strip()


def _verify(
    tokenizer: Any, ids: list[int], mask: NDArray[np.bool_], document: Document, learned: Sequence[int]
) -> None:
    """Raise UnrenderableError unless the masked tokens contain every learned answer."""
    masked = _squeezed(tokenizer.decode(np.array(ids)[mask].tolist(), skip_special_tokens=False))
    for turn in learned:
        message: Message = document.messages[turn]
        parts = [_answer(message.content), *message.tools_called]
        if any(_squeezed(part) not in masked for part in parts):
            raise UnrenderableError(
                f"{document.place}: the loss mask misses what the assistant said ({message.content!r:.60}): the chat "
                "template changes or drops it. Leave the conversation out, or correct the template"
            )


def _squeezed(text: str) -> str:
    return "".join(text.split())


def without_thinking(text: str) -> str:
    """The answer without reasoning."""
    return _BLOCK.sub("", text[_opened_before(text, 0, len(text)) :])


def thinks(text: str) -> bool:
    """Whether a text contains reasoning; templates may write empty blocks, which do not count."""
    inside = text[: _opened_before(text, 0, len(text))].rstrip().removesuffix(CLOSED)
    return bool(inside.strip()) or _BEGUN.search(text) is not None


def thinking_spans(text: str, span: Span) -> list[Span]:
    """The blocks inside a span of `text`, in order, with their tags and the white space after them."""
    start, end = span
    closed = _opened_before(text, start, end)
    opened_before = [(start, closed)] if closed > start else []
    return [*opened_before, *(match.span() for match in _BLOCK.finditer(text, closed, end))]


def _opened_before(text: str, start: int, end: int) -> int:
    """The end of a block that was open at `start`; `start` if there was none."""
    closed = text.find(CLOSED, start, end)
    if closed < 0 or text.find(OPENED, start, closed) >= 0:
        return start
    after = closed + len(CLOSED)
    while after < end and text[after].isspace():
        after += 1
    return after
