"""Conversations as text, with what the target would have generated in it.

An answer is rendered as in service: the prompt of its turn, and after it what the template writes for an answer that
nothing follows. Several turns share a text where the next prompt continues it. Where a template renders history in
another way (reasoning dropped, the system prompt moved to the last question, another end of turn), the next turn has a
text of its own.
"""

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from models.data.chat_template import ChatTemplate, UnrenderableError
from models.data.conversations import Document
from models.data.media import IMAGE
from models.data.message import Message, sent_back
from models.data.thinking import CLOSED, EMPTY_BLOCK, OPENED, Span, split_thinking, thinking_spans, thinks

Turns = Literal["all", "last"]
Messages = Sequence[dict[str, Any]]
Tools = Sequence[Mapping[str, Any]]
FOLLOWING = "x"
"""Content of the message after an answer that shows how the template ends the answer."""


@dataclass(frozen=True)
class Rendering:
    """A conversation up to one of its answers, at whose end the target stops."""

    text: str
    spans: tuple[Span, ...]
    """What the target generates in it, in order."""
    turns: int = 1
    """Answers in `spans`."""
    last: int = 0
    """The turn of the last of them."""
    thinking: bool = False
    """Whether reasoning is in `spans`."""
    reasoning_dropped: bool = False
    """Whether the conversation holds reasoning that the template has no place for."""


def render_conversation(template: ChatTemplate, document: Document, turns: Turns = "all") -> list[Rendering]:
    """The texts that teach all answers of a conversation, or the last, of those that may be learned.

    An answer before which nothing stands is never generated, so it is not learned, and neither is an empty one, or one
    that a client sent back without its reasoning, where the template has a place for it.

    Raises UnrenderableError: the template refuses the conversation, or drops or changes an answer.
    """
    document = _with_reasoning_apart(template, document)
    reasons = template.reads_reasoning(document.tools) or template.knows_thinking(document.tools)
    left_out = (sent_back(document.messages) if reasons else frozenset()) | {0}
    answers = [
        turn
        for turn, message in enumerate(document.messages)
        if turn not in left_out and message.role == "assistant" and message.learned and not message.is_empty
    ]
    renderings: list[Rendering] = []
    try:
        for turn in answers if turns == "all" else answers[-1:]:
            _add(renderings, render_turn(template, document, turn))
    except UnrenderableError as error:
        raise UnrenderableError(f"{document.place}: {error}") from error
    return renderings


def _add(renderings: list[Rendering], new: Rendering) -> None:
    """Append a rendering, or extend the last one by it."""
    if renderings:
        last = renderings[-1]
        for earlier in (last, _without_empty_block(last)):
            if new.text.startswith(earlier.text):
                renderings[-1] = Rendering(
                    new.text,
                    earlier.spans + new.spans,
                    earlier.turns + new.turns,
                    new.last,
                    earlier.thinking or new.thinking,
                    earlier.reasoning_dropped or new.reasoning_dropped,
                )
                return
    renderings.append(new)


def _without_empty_block(rendering: Rendering) -> Rendering:
    """The rendering without an empty `<think>` block at the beginning of its last answer.

    Templates write it before an answer without reasoning (Qwen3), and leave it out of history. Nobody said it, so the
    answer in the history may be learned in its place.
    """
    text, (start, end) = rendering.text, rendering.spans[-1]
    opened = text.rfind(OPENED, 0, start + len(OPENED))
    block = EMPTY_BLOCK.match(text, opened) if opened >= 0 else None
    if block is None or not start <= block.end() <= end:
        return rendering
    shorter = text[:opened] + text[block.end() :]
    return replace(rendering, text=shorter, spans=(*rendering.spans[:-1], (opened, end - len(block.group()))))


def render_turn(template: ChatTemplate, document: Document, turn: int) -> Rendering:
    """A conversation up to the answer in `turn`, which is what the target generates.

    Raises UnrenderableError.
    """
    message, tools = document.messages[turn], document.tools
    messages = [message.as_dict() for message in document.messages[: turn + 1]]
    thought, answer = _parts(message)
    _check_whole(template, turn, thought + answer)
    prompt, whole = template.render(messages[:-1], tools, prompt=True), template.render(messages, tools)
    # After an image the template's text has its tokens, not the mark.
    text = _after(prompt, whole, document.messages[turn - 1].content.rpartition(IMAGE)[2], thought)
    dropped = text is not None and not _says(text[len(prompt) :], thought)
    if thought and (text is None or dropped) and prompt.rstrip().endswith(CLOSED):
        raise UnrenderableError(
            f"the answer in turn {turn + 1} holds reasoning, and the chat template's prompt ends it before it begins: "
            "set data.thinking=strip, or leave the conversation out"
        )
    if text is not None:
        if dropped and template.knows_thinking(tools):
            text = prompt + _with_thought(thought, text[len(prompt) :])
        spans = [(len(prompt), len(text))]
    else:
        text, spans = whole, _tagged(template, messages, tools)
    if not spans:
        raise UnrenderableError(
            f"the chat template renders the answer in turn {turn + 1} in another way than its own prompt begins it: "
            "leave the conversation out, or use a template with {% generation %} tags"
        )
    generated = "".join(text[start:end] for start, end in spans)
    lost = [said for said in (answer, *message.tools_called) if not _says(generated, said)]
    if lost:
        raise UnrenderableError(
            f"the chat template changes or drops what the assistant said in turn {turn + 1} ({lost[0]!r:.60}): "
            "leave the conversation out, or correct the template"
        )
    if message.cut:
        end = _cut_off(template, turn, text, spans[-1], thought, answer)
    else:
        end = _stop(template, document, turn, text, spans[-1])
    shown = _says(generated, thought)
    if not shown and not answer and not message.tools_called:
        raise UnrenderableError(
            f"the answer in turn {turn + 1} is reasoning alone, for which the chat template has no place: leave the "
            "conversation out"
        )
    return Rendering(
        text=end,
        spans=(*spans[:-1], (spans[-1][0], len(end))),
        last=turn,
        thinking=thinks(generated) or bool(thought and shown),
        reasoning_dropped=not shown,
    )


def _check_whole(template: ChatTemplate, turn: int, said: str) -> None:
    """Raise UnrenderableError for an answer that goes on after a token at which the target stops."""
    for mark in template.ends:
        if mark in said.removesuffix(mark):
            raise UnrenderableError(
                f"the answer in turn {turn + 1} goes on after {mark}, where the target stops: remove it from the "
                "answer, or leave the conversation out"
            )


def _tagged(template: ChatTemplate, messages: Messages, tools: Tools) -> list[Span]:
    """What the template marks with `{% generation %}` in the last message."""
    if not template.marks_generation(tools):
        return []
    before = len(template.tagged(messages[:-1], tools)[1])
    return [(start, end) for start, end in template.tagged(messages, tools)[1][before:] if start < end]


def _with_reasoning_apart(template: ChatTemplate, document: Document) -> Document:
    """The document with `<think>` blocks as reasoning of their own, where the template has a place for it."""
    if not template.reads_reasoning(document.tools):
        return document
    messages = list(document.messages)
    for turn, message in enumerate(messages):
        if message.role == "assistant" and not message.reasoning and thinks(message.content):
            thought, answer = split_thinking(message.content)
            messages[turn] = replace(message, reasoning=thought, content=answer)
    return replace(document, messages=tuple(messages))


def _parts(message: Message) -> tuple[str, str]:
    """Reasoning and answer of a message, which may hold the one in the other."""
    inside, answer = split_thinking(message.content)
    return message.reasoning.strip() or inside, answer.strip()


def _after(prompt: str, whole: str, asked: str, thought: str) -> str | None:
    """`prompt` and what the target generates after it, from the rendered conversation `whole`; None if unknown."""
    if whole.startswith(prompt):
        return whole
    opened = prompt.rfind(OPENED)
    if opened >= 0 and not prompt[opened + len(OPENED) :].strip() and whole.startswith(prompt[:opened]):
        # The prompt opens a block, and the template leaves the reasoning out of answers (DeepSeek-R1).
        rest = whole[opened:]
        shown = EMPTY_BLOCK.match(rest)
        return prompt + (rest[shown.group().index(CLOSED) :] if shown and not thought else _closed(thought, rest))
    # The template writes a question that has an answer in another way (Mistral's system prompt): what it writes after
    # the question is the answer.
    tail = _shared_end(prompt, whole)
    if not tail or squeezed(asked) not in squeezed(tail):
        return None
    return prompt + whole[whole.rfind(tail) + len(tail) :]


def _shared_end(prompt: str, whole: str) -> str:
    """The longest end of `prompt` that occurs in `whole`."""
    known, unknown = 0, len(prompt) + 1
    while unknown - known > 1:
        size = (known + unknown) // 2
        known, unknown = (size, unknown) if prompt[-size:] in whole else (known, size)
    return prompt[len(prompt) - known :]


def _with_thought(thought: str, answer: str) -> str:
    """An answer with its reasoning: in the empty block that it begins with (Kimi-K2-Thinking), or in a new one."""
    block = EMPTY_BLOCK.match(answer)
    if block is None:
        return f"{OPENED}\n{_closed(thought, answer)}"
    space = block.group()[len(OPENED) : block.group().index(CLOSED)]
    # Half of the white space in an empty block stands before the reasoning.
    first, last = space[: len(space) // 2], space[len(space) // 2 :]
    return OPENED + first + thought + last + answer[block.group().index(CLOSED) :]


def _closed(thought: str, rest: str) -> str:
    """Reasoning inside an open block, its end, and the rest of an answer."""
    if rest.lstrip().startswith(CLOSED):
        return thought + rest.lstrip()
    return f"{thought}\n{CLOSED}\n\n" + rest.lstrip("\n")


def _cut_off(template: ChatTemplate, turn: int, text: str, span: Span, thought: str, answer: str) -> str:
    """`text` up to where an answer was cut: the template ends it as if the target had."""
    start, end = span
    if not thought and text[:start].rstrip().endswith(OPENED):
        raise UnrenderableError(
            f"the answer in turn {turn + 1} was cut, perhaps inside the reasoning that the chat template's prompt "
            "begins: leave the conversation out"
        )
    marked = min([place for mark in template.ends if (place := text.find(mark, start, end)) >= 0], default=end)
    place = text.rfind(answer, start, marked)
    if place < 0:
        raise UnrenderableError(
            f"the answer in turn {turn + 1} was cut, and the chat template changes its white space: leave the "
            "conversation out"
        )
    return text[: place + len(answer)]


def _stop(template: ChatTemplate, document: Document, turn: int, text: str, span: Span) -> str:
    """`text` up to where the target stops: after the first token that ends an answer."""
    start, end = span
    found = [place + len(mark) for mark in template.ends if (place := text.find(mark, start, end)) >= 0]
    if found:
        return text[: min(found)]
    return text[:start] + _ended(template, document, turn, text[start:end])


def _ended(template: ChatTemplate, document: Document, turn: int, generated: str) -> str:
    """An answer with its end where that is the beginning of the next turn (GLM's `<|user|>`)."""
    stripped = generated.rstrip()
    if not template.ends:
        return stripped
    message = document.messages[turn]
    following = Message("tool" if message.tools_called else "user", FOLLOWING)
    messages = [one.as_dict() for one in (*document.messages[: turn + 1], following)]
    try:
        text = template.render(messages, document.tools)
    except UnrenderableError:
        return stripped
    for answer in dict.fromkeys((generated, stripped)):
        # History may show the answer without its reasoning.
        blocks = thinking_spans(answer, (0, len(answer)))
        shown = answer[blocks[-1][1] if blocks else 0 :]
        places = {end: text.rfind(shown + end) for end in template.ends}
        end = max(places, key=places.__getitem__)
        if shown and places[end] >= 0:
            return answer + end
    return stripped


def _says(text: str, part: str) -> bool:
    return squeezed(part) in squeezed(text)


def squeezed(text: str) -> str:
    """Without white space, which templates trim, and in the form that tokenizers bring characters to."""
    return "".join(unicodedata.normalize("NFKC", text).split())
