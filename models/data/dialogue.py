"""Dialogues under regeneration: prompts for the target, and what its answers become.

Training takes the token ids as the engine read and emitted them. History is rendered anew for every turn, as for a
client that sends the conversation back.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from infra.refusal import Refusal
from models.config.data import RegenerationConfig
from models.data.chat_template import ChatTemplate, UnrenderableError
from models.data.conversations import Document, Message
from models.data.images import ImageShelf
from models.data.media import Image, Prompt
from models.data.rendering import render_turn
from models.data.samples import PLACEHOLDER, TEXT_ALONE, text_prefix, unknown_token
from models.data.thinking import CLOSED, OPENED, split_thinking

RESERVED = 6
"""Tokens of the context that SGLang gives to no prompt (0.5.23, managers/tp_worker.py)."""
PLACEHOLDER_SAID = " holds a token that stands for an image, and there is none"
_ANSWER, _THOUGHT = "\ue000", "\ue001"
"""Placeholders: private-use characters, which no template changes."""


@dataclass
class Generated:
    """Token ids of one or several turns, and which of them the target generated."""

    ids: list[int]
    mask: list[int]
    """1 where generated."""
    room: int = 0
    """Of a prompt that is answered while it is captured: most tokens of the answer."""
    images: tuple[Image, ...] = ()
    """Those that stand in it, in order."""


@dataclass
class Dialogue:
    """Turns so far. The target's answers replace the given ones, and a missing last answer is added."""

    document: Document
    sees: bool = False
    """Whether the target is shown images."""
    turns: list[Message] = field(default_factory=list)
    samples: list[Generated] = field(default_factory=list)
    """What was asked and generated: several where a later prompt does not continue the earlier tokens."""
    tokens: int = 0
    """Generated tokens so far."""
    cut: bool = False
    """Whether an answer reached the length limit."""
    fault: str = ""
    """Why the dialogue ended before its last turn; empty if it did not."""

    def __post_init__(self) -> None:
        document = self.document
        self._generated = generated_turns(document.messages)
        if document.media and not (self.sees and document.images):
            self.fault = f"{document.place}: {document.media}{TEXT_ALONE}"
        elif len(document.messages) == 1 and not document.plain and document.messages[0].role == "assistant":
            self.fault = f"{document.place}: there is nothing that the target could answer: leave the line out"

    @property
    def asked(self) -> str:
        """Hash of what the target is asked: the document without the answers that are generated anew."""
        return self._hash(len(self.document.messages))

    @property
    def asked_before(self) -> set[str]:
        """The same hash of each shorter dialogue that this one continues, of which it holds all answers."""
        return {self._hash(turn) for turn, generated in enumerate(self._generated) if generated} - {self.asked}

    def _hash(self, end: int) -> str:
        given = self.document.messages
        kept = tuple(given[turn] for turn in range(end) if not self._generated[turn])
        return replace(self.document, messages=kept).content_hash

    def advance(self) -> bool:
        """Go to the next answer to generate; False when there is none."""
        if self.fault or (self.document.plain and self.samples):
            return False
        given = self.document.messages
        while len(self.turns) < len(given) and not self._generated[len(self.turns)]:
            self.turns.append(given[len(self.turns)])
        return len(self.turns) < len(given) or self.turns[-1].role != "assistant"

    def so_far(self) -> Document:
        """The document up to here, with the target's answers."""
        return replace(self.document, messages=tuple(self.turns))

    def add(self, prompt: Sequence[int], generated: Sequence[int]) -> None:
        """Keep an answer's tokens, with those of the turns before it if its prompt continues them."""
        last = self.samples[-1] if self.samples else Generated([], [])
        if not last.ids or list(prompt[: len(last.ids)]) != last.ids:
            last = Generated([], [])
            self.samples.append(last)
        last.mask += [0] * (len(prompt) - len(last.ids)) + [1] * len(generated)
        last.ids = [*prompt, *generated]
        last.images = self.so_far().images
        self.tokens += len(generated)


def generated_turns(messages: Sequence[Message]) -> tuple[bool, ...]:
    """Whether the target generates each turn: any answer, except a greeting, which comes before the first question,
    and a tool call that the tool's result follows."""
    asks = [message.role in ("user", "tool") for message in messages]
    first = asks.index(True) if True in asks else 0
    return tuple(
        message.role == "assistant"
        and turn > first
        and not (message.tools_called and turn + 1 < len(messages) and messages[turn + 1].role == "tool")
        for turn, message in enumerate(messages)
    )


def check_answerable(document: Document) -> None:
    """Raise Refusal for a document of tokens, which has no turns to answer."""
    if document.tokens and not document.messages:
        raise Refusal(
            f"{document.place}: tokens have no turns that the target could answer: give conversations or text, or "
            "leave data.regeneration out"
        )


class Prompter:
    """Turns dialogues into prompts, and continuations into answers, with the target's tokenizer.

    Args:
        tokenizer: the target's.
        template: None for plain text.
        settings: of regeneration.
        add_bos: `target.add_bos`.
        max_tokens: prompts of as many tokens leave no room for an answer in a sample.
        ends: tokens that end the target's answers.
        media_ids: the target's placeholder tokens of images, video and sound.
        shelf: reads and keeps images; None: there are none.
    """

    vocabulary: int | None = None
    """Size of the target's vocabulary; default: the tokenizer's."""
    context: int | None = None
    """Most tokens of a prompt and its answer together; default: no limit."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: ChatTemplate | None,
        settings: RegenerationConfig,
        *,
        add_bos: bool,
        max_tokens: int | None = None,
        ends: frozenset[int] = frozenset(),
        media_ids: tuple[int, ...] = (),
        shelf: ImageShelf | None = None,
    ):
        self._shelf = shelf
        self._tokenizer: Any = tokenizer
        self._template, self._settings = template, settings
        self._max_tokens, self._ends, self._media_ids = max_tokens, ends, frozenset(media_ids)
        self._text_prefix = text_prefix(tokenizer, add_bos)
        self._chat_prefix = [self._tokenizer.bos_token_id] if add_bos else []

    def next(self, dialogue: Dialogue) -> Prompt | None:
        """The next prompt; None when the dialogue is over, perhaps by a fault."""
        return self._checked(dialogue) if dialogue.advance() else None

    def leave_open(self, dialogue: Dialogue) -> None:
        """Make the dialogue end with the prompt for its last answer, after the given ones; perhaps with a fault."""
        given = dialogue.document.messages
        generated = [turn for turn, is_one in enumerate(generated_turns(given)) if is_one]
        opens = dialogue.document.plain or given[-1].role != "assistant" or not generated
        dialogue.turns = list(given if opens else given[: generated[-1]])
        prompt = None if dialogue.fault else self._checked(dialogue)
        if prompt is not None:
            ids = list(prompt.tokens)
            dialogue.samples = [Generated(ids, [0] * len(ids), self._settings.max_new_tokens)]

    def _checked(self, dialogue: Dialogue) -> Prompt | None:
        """The prompt for the next answer; None where it cannot be used, which is the dialogue's fault."""
        try:
            prompt = self.prompt(dialogue.so_far())
        except UnrenderableError as error:
            dialogue.fault = str(error)
            return None
        if self.vocabulary is not None and (largest := max(prompt.tokens, default=0)) >= self.vocabulary:
            unknown = unknown_token(self._tokenizer, largest, self.vocabulary)
            dialogue.fault = f"{dialogue.document.place}: {unknown}"
            return None
        if not prompt.images and not self._media_ids.isdisjoint(prompt.tokens):
            dialogue.fault = f"{dialogue.document.place}: {PLACEHOLDER}"
            return None
        if self._max_tokens is not None and len(prompt.tokens) >= self._max_tokens:
            dialogue.fault = (
                f"{dialogue.document.place}: a prompt of {len(prompt.tokens)} tokens leaves no room for an answer: "
                f"raise data.max_tokens ({self._max_tokens}), or leave the conversation out"
            )
            return None
        if self.context is not None and len(prompt.tokens) >= self.context - RESERVED:
            dialogue.fault = (
                f"{dialogue.document.place}: a prompt of {len(prompt.tokens)} tokens leaves no room for an answer in "
                f"the context of {self.context}"
            )
            return None
        return prompt

    def prompt(self, document: Document) -> Prompt:
        """What the target continues after the turns of `document`.

        Raises UnrenderableError: the template refuses the turns, or an image cannot be read.
        """
        if document.plain:
            ids = self._tokenizer(document.text, add_special_tokens=False, verbose=False)["input_ids"]
            return Prompt((*self._text_prefix, *ids[: self._settings.prompt_tokens]))
        text, images = self._prompt_text(document), tuple[Path, ...]()
        if document.images and self._shelf is not None:
            try:
                text, _, names = self._shelf.expand(text, (), document.images)
            except UnrenderableError as error:
                raise UnrenderableError(f"{document.place}: {error}") from error
            images = tuple(self._shelf.folder / name for name in names)
        ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return Prompt(tuple(ids if ids[:1] == self._chat_prefix else [*self._chat_prefix, *ids]), images)

    def room(self, prompt: Prompt) -> int:
        """Most tokens of the answer to `prompt`. SGLang refuses a limit beyond the context."""
        most = self._settings.max_new_tokens
        return most if self.context is None else min(most, self.context - len(prompt.tokens))

    def answer(self, dialogue: Dialogue, prompt: Prompt, tokens: list[int]) -> None:
        """Add the continuation of `prompt` to the dialogue, which ends with one that has an image's token in it."""
        if prompt.images and not self._media_ids.isdisjoint(tokens):
            dialogue.fault = f"{dialogue.document.place}: the target's answer{PLACEHOLDER_SAID}"
            return
        before = dialogue.so_far()
        dialogue.add(prompt.tokens, tokens)
        dialogue.cut |= self._ends.isdisjoint(tokens[-1:])
        if dialogue.document.plain:
            text = self._tokenizer.decode([*prompt.tokens, *tokens], skip_special_tokens=True)
            dialogue.turns = [replace(dialogue.document.messages[0], content=text)]
            return
        dialogue.turns.append(self._message(before, self._tokenizer.decode(tokens, skip_special_tokens=False)))

    def _prompt_text(self, document: Document) -> str:
        if self._template is None:
            raise Refusal(
                f"{document.place}: a conversation needs the target's chat template to be regenerated: set "
                "data.chat_template=tokenizer, or give plain text"
            )
        try:
            return self._template.render([m.as_dict() for m in document.messages], document.tools, prompt=True)
        except UnrenderableError as error:
            raise UnrenderableError(f"{document.place}: {error}") from error

    def _message(self, before: Document, text: str) -> Message:
        """The message that a client gets for a generated text: reasoning and content, without the template's tags.

        The template itself says how: it is rendered with placeholders, and the text is matched with the result.
        """
        assert self._template is not None
        for message in (Message("assistant", _ANSWER, _THOUGHT), Message("assistant", _ANSWER)):
            rendered = self._rendered(before, message)
            parts = None if rendered is None else answer_parts(text, rendered, self._template.ends)
            if parts is not None:
                return Message("assistant", *parts)
        for end in self._template.ends:
            text = text.removesuffix(end)
        if self._prompt_text(before).rstrip().endswith(OPENED) and CLOSED not in text:
            return Message("assistant", "", text.strip())  # cut inside its reasoning
        reasoning, answer = split_thinking(text)
        return Message("assistant", answer, reasoning)

    def _rendered(self, before: Document, message: Message) -> str | None:
        """How the template writes `message`, an answer of placeholders; None where it drops them or refuses."""
        assert self._template is not None
        document = replace(before, messages=(*before.messages, message))
        try:
            rendering = render_turn(self._template, document, len(before.messages))
        except UnrenderableError:
            return None
        (start, end), *_ = rendering.spans
        rendered = rendering.text[start:end]
        return None if message.reasoning and _THOUGHT not in rendered.partition(_ANSWER)[0] else rendered


def answer_parts(text: str, rendered: str, ends: Sequence[str]) -> tuple[str, str] | None:
    """Answer and reasoning of a generated text that is written as `rendered` is with placeholders; None: it is not.

    White space may differ, and the end may differ or be missing. Each part is found in one pass: a pattern of the whole
    text would look at a long run of white space again from each of its characters.
    """
    head, _, tail = rendered.partition(_ANSWER)
    opening, _, middle = head.rpartition(_THOUGHT) if _THOUGHT in head else (head, "", "")
    opened = re.match(_lenient(opening), text)
    # White space before it belongs to the reasoning, which is stripped.
    closed = opened and re.compile(_lenient(middle.lstrip() or middle)).search(text, opened.end())
    if not opened or not closed:
        return None
    answer = text[closed.end() :]
    unended = [answer, *(answer.removesuffix(end) for end in ends)]
    shortest = min((_without_tail(one, tail) for one in unended), key=len)
    return shortest, text[opened.end() : closed.start()].strip()


def _without_tail(text: str, tail: str) -> str:
    """`text` without `tail` at its end, in which white space may differ; `text` where it does not end so."""
    first, *others = re.split(r"\s+", tail)
    rest = text
    for piece in reversed(others):
        if not rest.endswith(piece):
            return text
        rest = rest.removesuffix(piece).rstrip()
    return rest.removesuffix(first) if rest.endswith(first) else text


def _lenient(text: str) -> str:
    """A pattern of `text` in which white space may differ."""
    return r"\s*".join(map(re.escape, re.split(r"\s+", text)))
