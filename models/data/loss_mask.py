"""Which tokens of a conversation the target would have generated. Used by the process that prepares samples."""

import re
from typing import Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from models.data.conversations import Document

Messages = list[dict[str, str]]
Span = tuple[int, int]
"""First character, and the one after the last."""

_SOMETHING = "\ue000"
"""Stands for an answer; a private-use character, which no template changes."""

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


def marks_generation(template: str) -> bool:
    """Whether a chat template marks assistant text with `{% generation %}`."""
    return _GENERATION_TAG.search(template) is not None


def tokenize_conversation(
    tokenizer: PreTrainedTokenizerBase, document: Document, template: str
) -> tuple[list[int], NDArray[np.bool_]]:
    """Token ids of a whole conversation and the mask over its assistant tokens (end-of-turn marker included).

    The mask comes from the template's generation tags, or else from the difference between the conversation and the
    prompt of each assistant turn.

    Raises:
        ValueError: the template refuses the conversation, or the masked text does not hold what the assistant said.
    """
    messages = [message.as_dict() for message in document.messages]
    try:
        text, spans = (_by_tags if marks_generation(template) else _by_difference)(tokenizer, messages, document.place)
    except TemplateError as error:
        raise ValueError(
            f"{document.place}: the chat template refuses this ({error}): correct the roles or leave it out"
        ) from error
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids: Any = encoded["input_ids"]
    mask = _covered(np.array(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2), spans)
    _verify(tokenizer, ids, mask, document)
    return ids, mask


def _covered(offsets: NDArray[np.int64], spans: list[Span]) -> NDArray[np.bool_]:
    """Tokens that start inside a span: characters of several tokens count with each, which `char_to_token` misses."""
    starts, ends = offsets.T
    mask = np.zeros(len(offsets), dtype=bool)
    for start, end in spans:
        mask |= (starts >= start) & (starts < end) & (ends > start)
    return mask


def _by_tags(tokenizer: Any, messages: Messages, _place: str) -> tuple[str, list[Span]]:
    rendered: Any = render_jinja_template(
        conversations=[messages],
        chat_template=tokenizer.get_chat_template(),
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    (text,), (spans,) = rendered
    return text, spans


def _by_difference(tokenizer: Any, messages: Messages, place: str) -> tuple[str, list[Span]]:
    text: str = tokenizer.apply_chat_template(messages, tokenize=False)
    turns = (turn for turn, message in enumerate(messages) if message["role"] == "assistant")
    return text, [_span(tokenizer, messages, turn, text, place) for turn in turns]


def _span(tokenizer: Any, messages: Messages, turn: int, text: str, place: str) -> Span:
    """Characters of `text` that the target generates in one assistant turn."""
    # Templates may render a turn differently when it is the last one (Qwen3's empty thinking block): only what follows
    # the answer, the end-of-turn marker, is learned from there.
    marked = [*messages[:turn], {"role": "assistant", "content": _SOMETHING}]
    _, _, marker = tokenizer.apply_chat_template(marked, tokenize=False).rpartition(_SOMETHING)
    # A greeting has no prompt, and templates refuse to render nothing: only its words are taken.
    asked = messages[:turn]
    prompt: str = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True) if asked else ""
    said = re.escape(_answer(messages[turn]["content"])) + r"\s*" + re.escape(marker.rstrip())
    found = re.compile(said).search(text, len(prompt))
    if not text.startswith(prompt) or found is None:
        raise ValueError(
            f"{place}: the chat template renders turn {turn + 1} differently inside the conversation, so its tokens "
            "cannot be found: leave the conversation out, or use a template with {% generation %} tags"
        )
    return len(prompt) if asked else found.start(), found.end()


def _answer(content: str) -> str:
    """What every template renders of an assistant's turn: thinking is dropped from earlier turns by some."""
    return content.rpartition("</think>")[2].strip()


def _verify(tokenizer: Any, ids: list[int], mask: NDArray[np.bool_], document: Document) -> None:
    said = _squeezed(tokenizer.decode(np.array(ids)[mask].tolist(), skip_special_tokens=False))
    for message in document.messages:
        if message.role == "assistant" and _squeezed(_answer(message.content)) not in said:
            raise ValueError(
                f"{document.place}: the loss mask misses what the assistant said ({message.content!r:.60}): the chat "
                "template changes or drops it. Leave the conversation out, or correct the template"
            )


def _squeezed(text: str) -> str:
    return "".join(text.split())
