"""The chat template of a run: the tokenizer's own or a file's, with the recipe's arguments."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from infra.refusal import Refusal
from infra.settings import expanded
from models.config.data import NO_TEMPLATE, OWN_TEMPLATE, TemplateArgument
from models.data.message import joined
from models.data.thinking import CLOSED, Span

FAULTS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError, ArithmeticError)
"""Raised by templates for conversations that they were not written for."""
PROBE = "probe"
"""Content of a message that shows what a template reads."""
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_REASONING_KEY = re.compile(r"\breasoning_content\b|[.'\"]thinking\b")
_MEDIA_WORDS = ("image", "audio", "video", "vision")
_LOOP_VARIABLES = ("message", "msg", "m")
Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]
Content = str | list[dict[str, str]]


class UnrenderableError(Refusal):
    """The chat template cannot make a sample of this conversation; it may of others."""


@dataclass(frozen=True)
class ChatTemplate:
    """Renders conversations as the target's server does."""

    tokenizer: PreTrainedTokenizerBase
    source: str | Mapping[str, str]
    """The Jinja text; some tokenizers have several by name, one of them for conversations with tools."""
    arguments: Mapping[str, TemplateArgument] = field(default_factory=dict)
    ends: tuple[str, ...] = ()
    """Texts of the tokens that end the target's answers."""

    def render(self, messages: Messages, tools: Tools = (), *, prompt: bool = False) -> str:
        """The text of a conversation; `prompt`: with the opening of an answer after it.

        Raises UnrenderableError for messages that the template refuses.
        """
        return self._render(messages, tools, prompt, tagged=False)[0]

    def tagged(self, messages: Messages, tools: Tools) -> tuple[str, list[Span]]:
        """The text of a conversation, and what the template marks with `{% generation %}` in it."""
        return self._render(messages, tools, prompt=False, tagged=True)

    def marks_generation(self, tools: Tools) -> bool:
        """Whether the template marks what the assistant generates with `{% generation %}`."""
        return _GENERATION_TAG.search(self._text(tools)) is not None

    def knows_thinking(self, tools: Tools) -> bool:
        """Whether the template treats `<think>` blocks in any way."""
        return CLOSED in self._text(tools)

    def reads_reasoning(self, tools: Tools) -> bool:
        """Whether the template has a place for reasoning that is separate from the content."""
        return _REASONING_KEY.search(self._text(tools)) is not None

    @cached_property
    def hash(self) -> str:
        """Hash of the template and its arguments."""
        parts = [self.source, dict(self.arguments)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    @cached_property
    def adds_space(self) -> bool:
        """Whether the tokenizer begins every text with a space of its own (Llama 2), so that a part is no text."""
        tokenizer: Any = self.tokenizer
        return tokenizer.convert_ids_to_tokens(tokenizer("a", add_special_tokens=False)["input_ids"]) != ["a"]

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template reads content as a list of parts only, as some of multimodal targets do."""

        def shows(content: Any) -> bool:
            try:
                return PROBE in self._rendered([{"role": "user", "content": content}], (), False, tagged=False)[0]
            except FAULTS:
                return False

        return not shows(PROBE) and shows(_parts(PROBE))

    @cached_property
    def _reading_parts(self) -> dict[str, bool]:
        """Of every template, whether it reads content as a list of parts, by `reads_parts`."""
        texts = [self.source] if isinstance(self.source, str) else self.source.values()
        return {text: reads_parts(text) for text in texts}

    def _text(self, tools: Tools) -> str:
        if isinstance(self.source, str):
            return self.source
        return self.source.get("tool_use", self.source["default"]) if tools else self.source["default"]

    def _render(self, messages: Messages, tools: Tools, prompt: bool, *, tagged: bool) -> tuple[str, list[Span]]:
        if not messages:
            raise UnrenderableError("a template needs a first message")
        shown = [{**message, "content": self._content(message["content"], tools)} for message in messages]
        # SGLang tries functions alone where a template fails on tools.
        forms = [tools, [tool.get("function", tool) for tool in tools]] if tools else [tools]
        fault: Exception | None = None
        for form in forms:
            try:
                return self._rendered(shown, form, prompt, tagged=tagged)
            except FAULTS as error:
                fault = fault or error
        raise UnrenderableError(
            f"the chat template refuses this ({fault}): correct the roles or leave it out"
        ) from fault

    def _content(self, content: Content, tools: Tools) -> Content:
        """A content as SGLang hands it to the template: several texts as parts, or joined to one."""
        if isinstance(content, str):
            return _parts(content) if self._takes_parts else content
        if self._reading_parts[self._text(tools)] or any(part["type"] != "text" for part in content):
            return content
        return joined([part["text"] for part in content])

    def _rendered(
        self, messages: list[dict[str, Any]], tools: Tools, prompt: bool, *, tagged: bool
    ) -> tuple[str, list[Span]]:
        rendered: Any = render_jinja_template(
            conversations=[messages],
            tools=[dict(tool) for tool in tools] or None,
            chat_template=self._text(tools),
            add_generation_prompt=prompt,
            return_assistant_tokens_mask=tagged,
            **{**self.tokenizer.special_tokens_map, **self.arguments},
        )
        (text,), spans = rendered
        return text, spans[0] if tagged else []


def _parts(content: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}]


def reads_parts(text: str) -> bool:
    """Whether SGLang 0.5.23 takes a template for one that reads content as a list of parts.

    See `detect_jinja_template_content_format` in its parser/jinja_template_utils.py: the template speaks of media, or
    has a loop over the content of `message`, `msg` or `m`.
    """
    if any(word in text for word in _MEDIA_WORDS):
        return True
    try:
        loops = _compile_jinja_template(text).environment.parse(text).find_all(nodes.For)
    except TemplateError:
        return False
    return any(_is_content(loop.iter) for loop in loops)


def _is_content(node: nodes.Node) -> bool:
    """Whether an expression is the content of a message, perhaps filtered or sliced."""
    if isinstance(node, nodes.Filter | nodes.Test) and node.node is not None:
        return _is_content(node.node)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _is_content(node.node)
    if isinstance(node, nodes.Getattr):
        key = node.attr
    elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        key = node.arg.value
    else:
        return False
    return key == "content" and isinstance(node.node, nodes.Name) and node.node.name in _LOOP_VARIABLES


def open_chat_template(
    tokenizer: PreTrainedTokenizerBase,
    name: str = OWN_TEMPLATE,
    arguments: Mapping[str, TemplateArgument] | None = None,
    ends: frozenset[int] = frozenset(),
) -> ChatTemplate | None:
    """The template that `data.chat_template` names; None for plain text.

    Args:
        tokenizer: the target's.
        name: `tokenizer`, `none`, or a Jinja file.
        arguments: `data.template_arguments`.
        ends: ids of the tokens that end the target's answers.

    Raises Refusal: no template, a missing or broken file, or an argument that the template never reads.
    """
    arguments = arguments or {}
    if name == NO_TEMPLATE:
        if arguments:
            raise Refusal("data.template_arguments needs a chat template, and data.chat_template is none: remove one")
        return None
    source = read_template_file(name) or _own(tokenizer)
    _check_syntax(source, str(tokenizer.name_or_path) if name == OWN_TEMPLATE else name)
    text = source if isinstance(source, str) else "\n".join(source.values())
    for argument in arguments:
        if not re.search(rf"\b{re.escape(argument)}\b", text):
            raise Refusal(f"data.template_arguments.{argument}: the chat template never reads it: correct or remove it")
    known = [token for token in sorted(ends) if token < len(tokenizer)]
    texts = tuple(str(token) for token in tokenizer.convert_ids_to_tokens(known))
    return ChatTemplate(tokenizer, source, arguments, texts)


def _own(tokenizer: PreTrainedTokenizerBase) -> str | Mapping[str, str]:
    source: Any = tokenizer.chat_template
    if not source:
        raise Refusal(
            f"the tokenizer in {tokenizer.name_or_path} has no chat template: name a Jinja file in data.chat_template, "
            "or set data.chat_template=none for plain text"
        )
    if not isinstance(source, str) and "default" not in source:
        raise Refusal(
            f"the tokenizer in {tokenizer.name_or_path} has the chat templates {', '.join(source)} and none called "
            "default: name a Jinja file in data.chat_template"
        )
    return source


def read_template_file(name: str) -> str | None:
    """The text of the Jinja file that `data.chat_template` names; None if it names none. Raises Refusal without it."""
    if name in (OWN_TEMPLATE, NO_TEMPLATE):
        return None
    path = expanded("data.chat_template", name)
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise Refusal(
            f"data.chat_template {str(path)!r}: there is no such file (looked in {Path.cwd()}): give a Jinja file, "
            "tokenizer (the target's own template) or none"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise Refusal(f"data.chat_template {str(path)!r} cannot be read ({error}): give a Jinja file") from error


def _check_syntax(source: str | Mapping[str, str], place: str) -> None:
    for text in [source] if isinstance(source, str) else source.values():
        try:
            render_jinja_template(conversations=[[{"role": "user", "content": ""}]], chat_template=text)
        except TemplateSyntaxError as error:
            raise Refusal(
                f"{place}:{error.lineno}: the chat template is not valid Jinja ({error.message}): correct it"
            ) from error
        except FAULTS:  # what the template says to this message does not matter
            continue
