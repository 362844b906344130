"""One document while it is regenerated: which prompt the target gets next, and what becomes of its answer."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from infra.refusal import Refusal
from models.config.data import RegenerationConfig
from models.data.conversations import Document, Message
from models.data.samples import chat_template
from models.data.thinking import without_thinking


@dataclass
class Dialogue:
    """Turns so far; the given answers are replaced by the target's own, and a missing last one is added."""

    document: Document
    said: list[Message] = field(default_factory=list)
    tokens: int = 0
    """Generated so far."""
    cut: bool = False
    """An answer came to the length limit."""

    @property
    def asked(self) -> str:
        """Identity of what the target is asked: the document without its answers."""
        return replace(self.document, messages=tuple(without_answers(self.document))).content_hash

    def advance(self) -> bool:
        """Go to the next answer that is to be generated; False when there is none."""
        given = self.document.messages
        while len(self.said) < len(given) and not is_answer(given, len(self.said)):
            self.said.append(given[len(self.said)])
        return len(self.said) < len(given) or self.said[-1].role != "assistant"

    def finished(self) -> Document:
        """The document with the target's answers."""
        return replace(self.document, messages=tuple(self.said))


def without_answers(document: Document) -> list[Message]:
    """What others said. Plain text has nobody to answer it: all of it is there."""
    given = document.messages
    return [message for turn, message in enumerate(given) if not is_answer(given, turn)]


def is_answer(messages: Sequence[Message], turn: int) -> bool:
    """Whether the target is to say it anew: a call that a tool's result follows stays, or the result would not fit."""
    followed = turn + 1 < len(messages) and messages[turn + 1].role == "tool"
    return messages[turn].role == "assistant" and not (messages[turn].tools_called and followed)


class Prompter:
    """Turns dialogues into prompts, and continuations into answers, by a target's tokenizer."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, settings: RegenerationConfig, *, templated: bool, add_bos: bool
    ):
        self._tokenizer: Any = tokenizer
        self._settings, self._templated = settings, templated
        if templated:
            chat_template(tokenizer)
        bos: Any = tokenizer.bos_token_id
        own: Any = tokenizer("")["input_ids"]
        self._prefix = [bos] if add_bos or (bos is not None and own[:1] == [bos]) else []

    def prompt(self, dialogue: Dialogue) -> list[int]:
        """Token ids to be continued."""
        if dialogue.document.plain:
            ids = self._tokenizer(dialogue.document.text, add_special_tokens=False, verbose=False)["input_ids"]
            return [*self._prefix, *ids[: self._settings.prompt_tokens]]
        if not self._templated:
            raise Refusal(
                f"{dialogue.document.place}: a conversation needs the target's chat template to be regenerated: set "
                "data.chat_template=tokenizer, or give plain text"
            )
        turns = [message.as_dict() for message in dialogue.said]
        tools = list(dialogue.document.tools) or None
        text = self._tokenizer.apply_chat_template(turns, tools=tools, tokenize=False, add_generation_prompt=True)
        ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids if not self._prefix or ids[:1] == self._prefix else [*self._prefix, *ids]

    def answer(self, dialogue: Dialogue, prompt: list[int], tokens: list[int]) -> None:
        """Take the continuation of `prompt` in."""
        dialogue.tokens += len(tokens)
        dialogue.cut |= len(tokens) >= self._settings.max_new_tokens
        if dialogue.document.plain:
            text = self._tokenizer.decode(prompt + tokens, skip_special_tokens=True)
            dialogue.said = [replace(dialogue.document.messages[0], content=text)]
            return
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        if self._settings.thinking == "strip":
            text = without_thinking(text)
        dialogue.said.append(Message("assistant", text.strip()))
