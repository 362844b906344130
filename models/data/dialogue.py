"""Dialogues under regeneration: prompts for the target, and what its answers become."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from infra.refusal import Refusal
from models.config.data import RegenerationConfig
from models.data.conversations import Document, Message
from models.data.loss_mask import without_thinking
from models.data.samples import chat_template, text_prefix


@dataclass
class Dialogue:
    """Turns so far. The target's answers replace the given ones, and a missing last answer is added."""

    document: Document
    turns: list[Message] = field(default_factory=list)
    tokens: int = 0
    """Generated tokens so far."""
    cut: bool = False
    """Whether an answer reached the length limit."""

    @property
    def asked(self) -> str:
        """Hash of what the target is asked: the document without the answers that are generated anew."""
        given = self.document.messages
        kept = tuple(message for turn, message in enumerate(given) if not is_generated(given, turn))
        return replace(self.document, messages=kept).content_hash

    def advance(self) -> bool:
        """Go to the next answer to generate; False when there is none."""
        given = self.document.messages
        while len(self.turns) < len(given) and not is_generated(given, len(self.turns)):
            self.turns.append(given[len(self.turns)])
        return len(self.turns) < len(given) or self.turns[-1].role != "assistant"

    def so_far(self) -> Document:
        """The document up to here, with the target's answers."""
        return replace(self.document, messages=tuple(self.turns))


def is_generated(messages: Sequence[Message], turn: int) -> bool:
    """Whether the target generates this turn: any answer, except a tool call that the tool's result follows."""
    followed = turn + 1 < len(messages) and messages[turn + 1].role == "tool"
    return messages[turn].role == "assistant" and not (messages[turn].tools_called and followed)


def check_answerable(document: Document) -> None:
    """Raise Refusal for a document of tokens, which has no turns to answer."""
    if document.tokens is not None:
        raise Refusal(
            f"{document.place}: tokens have no turns that the target could answer: give conversations or text, or "
            "leave data.regeneration out"
        )


class Prompter:
    """Turns dialogues into prompts, and continuations into answers, with the target's tokenizer."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, settings: RegenerationConfig, *, templated: bool, add_bos: bool
    ):
        self._tokenizer: Any = tokenizer
        self._settings, self._templated = settings, templated
        if templated:
            chat_template(tokenizer)
        self._prefix = text_prefix(tokenizer, add_bos)

    def prompt(self, document: Document) -> list[int]:
        """Token ids that the target continues after the turns of `document`."""
        if document.plain:
            ids = self._tokenizer(document.text, add_special_tokens=False, verbose=False)["input_ids"]
            return [*self._prefix, *ids[: self._settings.prompt_tokens]]
        if not self._templated:
            raise Refusal(
                f"{document.place}: a conversation needs the target's chat template to be regenerated: set "
                "data.chat_template=tokenizer, or give plain text"
            )
        turns = [message.as_dict() for message in document.messages]
        tools = list(document.tools) or None
        text = self._tokenizer.apply_chat_template(turns, tools=tools, tokenize=False, add_generation_prompt=True)
        ids = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return ids if not self._prefix or ids[:1] == self._prefix else [*self._prefix, *ids]

    def answer(self, dialogue: Dialogue, prompt: list[int], tokens: list[int]) -> None:
        """Add the continuation of `prompt` to the dialogue."""
        dialogue.tokens += len(tokens)
        dialogue.cut |= len(tokens) >= self._settings.max_new_tokens
        if dialogue.document.plain:
            text = self._tokenizer.decode(prompt + tokens, skip_special_tokens=True)
            dialogue.turns = [replace(dialogue.document.messages[0], content=text)]
            return
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        if self._settings.thinking == "strip":
            text = without_thinking(text)
        dialogue.turns.append(Message("assistant", text.strip()))
