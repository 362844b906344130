"""The turns of a record as messages: in OpenAI's form, ShareGPT's or Anthropic's, from data sets and request logs."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from infra.refusal import Refusal
from models.data.media import medium, seen_turns
from models.data.message import Message, joined
from models.data.thinking import thinks, without_thinking
from models.data.tools import calls_of, parsed

ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "ipython"), "tool"),
}
_KEYS = ("conversations", "messages", "conversation")
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_TEMPLATE_KEYS = ("tool_call_id", "name")
"""Keys of a turn that templates get unchanged. SGLang drops them from a user's turns."""
_CUT = frozenset(("length", "max_tokens", "model_context_window_exceeded", "content_filter", "abort", "error"))
"""Reasons, in OpenAI's API, Anthropic's and those of engines, for which an answer stops before its end."""
_CUT_KEYS = {"finish_reason", "stop_reason"}
Turn = dict[str, Any]
"""A turn with `role`, one of the roles of Message, `content`, a text or parts that are text or media, and `number`."""


def has_turns(record: Mapping[str, Any]) -> bool:
    """Whether a record has a key for turns, perhaps an empty one."""
    return any(record.get(key) is not None for key in _KEYS)


def turns_of(place: str, record: Mapping[str, Any]) -> list[Turn]:
    """The turns of a record, and the answer that a log keeps beside them. Empty for a record without turns.

    Raises Refusal: a turn without role or content, or with an unknown role or part.
    """
    lists = (parsed(record[key]) for key in _KEYS if record.get(key) is not None)
    given: list[Any] = next((turns for turns in lists if isinstance(turns, list) and turns), [])
    turns = [turn for number, one in enumerate(given, start=1) for turn in _in_openai_form(place, number, one)]
    if not turns:
        return turns
    begun = turns[-1]["role"] == "assistant"
    if (answer := _logged_answer(record, begun)) is not None:
        answered = _in_openai_form(place, len(given) + 1, answer)
        turns = [*turns[:-1], _continued(turns[-1], answered[-1], record)] if begun else [*turns, *answered]
    if turns[-1]["role"] == "assistant" and _was_cut(record):
        turns[-1] = {**turns[-1], "finish_reason": "length"}
    return turns


def messages_of(place: str, record: Mapping[str, Any], turns: Sequence[Turn], media: str) -> tuple[Message, ...]:
    """The messages of a record's turns, with the system prompt that stands beside them.

    Args:
        place: of the record, for messages.
        record: may have images beside its turns.
        turns: of `turns_of`.
        media: what the record holds beside text; empty for text alone.

    Raises Refusal: broken tool calls, or keys that are no text.
    """
    messages = tuple(_message(f"{place}: turn {turn['number']}", turn) for turn in turns)
    if media:
        messages = _shown(record, turns, messages)
    system = {"role": "system", "content": record.get("system"), "number": 0}
    beside = isinstance(system["content"], str | list) and not any(turn["role"] == "system" for turn in turns)
    prompts = (_message(f"{place}: system", turn) for turn in (_in_openai_form(place, 0, system) if beside else ()))
    return (*(prompt for prompt in prompts if prompt.content.strip()), *messages)


def _logged_answer(record: Mapping[str, Any], begun: bool) -> Turn | None:
    """The answer beside a logged request: in `choices`, or in a `response` that has them, is a message or a text.

    `begun`: the turns end with an answer. What stands beside it, and is no response of an API, is then none.
    """
    response = record.get("response")
    known = parsed(response)
    for holder in (record, known):
        choices = parsed(holder.get("choices")) if isinstance(holder, dict) else None
        first = choices[0] if isinstance(choices, list) and choices else None
        answer = first.get("message") if isinstance(first, dict) else None
        if isinstance(answer, dict):
            break
    else:
        answer = known if isinstance(known, dict) else {"content": response}
        if begun and not (isinstance(answer.get("content"), list) or _CUT_KEYS & set(answer)):
            answer = {}  # another answer to the same question, as preference data has one
    said = any(answer.get(key) for key in ("content", "tool_calls", "function_call"))
    if not said and _was_cut(record) and any(answer.get(key) for key in _REASONING_KEYS):
        return {**answer, "role": "assistant", "content": "", "refusal": None}
    return {**answer, "role": "assistant"} if said else None


def _continued(begun: Turn, answer: Turn, record: Mapping[str, Any]) -> Turn:
    """An answer whose beginning stands in the request (a prefill), with the rest that the target gave."""
    contents = [turn["content"] for turn in (begun, answer)]
    if begun.get("tool_calls") or any(medium(part) for one in contents if isinstance(one, list) for part in one):
        return begun
    first, rest = (one if isinstance(one, str) else joined([part["text"] for part in one]) for one in contents)
    if without_thinking(first).strip() == rest.strip():  # a log that adds the answer to the turns
        said = {key: value for key, value in begun.items() if value is not None}
        return begun if thinks(first) else {**answer, **said}
    # Some servers repeat the beginning (vLLM's `echo`).
    whole = rest if record.get("echo") else first + rest
    return {**begun, **answer, "content": whole, "number": begun["number"]}


def _was_cut(record: Mapping[str, Any]) -> bool:
    """Whether a log says that the answer was cut."""
    holders = [one for one in (record, parsed(record.get("response"))) if isinstance(one, dict)]
    choices = [parsed(holder.get("choices")) for holder in holders]
    firsts = [one[0] for one in choices if isinstance(one, list) and one and isinstance(one[0], dict)]
    return any(_names_a_cut(one.get(key)) for one in [*holders, *firsts] for key in _CUT_KEYS)


def _names_a_cut(reason: Any) -> bool:
    return isinstance(reason, str) and reason.lower() in _CUT


def _in_openai_form(place: str, number: int, given: Any) -> list[Turn]:
    """One turn as turns of OpenAI's API: Anthropic's may have results of tools among their parts."""
    where, turn = f"{place}: turn {number}", given if isinstance(given, dict) else {}
    name = turn.get("role", turn.get("from"))
    role = ROLES.get(str(name).lower())
    content = turn["content"] if turn.get("content") is not None else turn.get("value")
    if role == "tool" and not (content is None or isinstance(content, str) or _are_parts(content)):
        content = json.dumps(content, ensure_ascii=False)
    if not isinstance(content, str | list) or content == [] or (content == "" and turn.get("refusal")):
        # As in OpenAI's API, a turn with calls needs no content.
        content = "" if turn.get("tool_calls") or turn.get("function_call") else None
    if name is None or content is None:
        raise Refusal(
            f"{where} needs 'role' and 'content' (text), or 'from' and 'value': correct it; got {given!r:.80}"
        )
    if role is None:
        raise Refusal(f"{where} has the role {name!r}; known are {sorted(ROLES)}: rename it")
    turn = {**turn, "role": role, "content": content, "number": number}
    if str(name).lower() == "function_call":  # LLaMA-Factory's
        calls = parsed(content)
        return [{**turn, "content": "", "tool_calls": calls if isinstance(calls, list) else [calls]}]
    return _from_parts(where, turn) if isinstance(content, list) else [turn]


def _are_parts(content: Any) -> bool:
    """Whether what a tool returned is a list of parts, and not an object of its own."""
    return (
        isinstance(content, list)
        and content != []
        and all(isinstance(part, dict) and (part.get("type") == "text" or medium(part)) for part in content)
    )


def _from_parts(where: str, turn: Turn) -> list[Turn]:
    """A turn whose content is parts, without those that OpenAI's API keeps elsewhere."""
    kept, calls, results, thoughts = list[Any](), list[Turn](), list[Turn](), list[str]()
    for part in turn["content"]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "tool_use":
            calls.append({"id": part.get("id"), "function": {**part, "arguments": part.get("input")}})
        elif kind == "tool_result":
            result = {"role": "tool", "content": part.get("content") or "", "tool_call_id": part.get("tool_use_id")}
            results += _in_openai_form(where, turn["number"], result)
        elif kind in ("thinking", "reasoning"):
            thoughts.append(str(part.get("thinking") or part.get("text") or ""))
        elif medium(part) or (isinstance(part, dict) and isinstance(part.get("text"), str)):
            kept.append(part)
        else:
            raise Refusal(
                f"{where} holds a part that is not known: {part!r:.80}. Parts are text, images, thinking, tool_use and "
                "tool_result: convert or remove it"
            )
    if results and not kept:
        return results
    turn = {**turn, "content": kept or ""}
    if thoughts:
        turn["reasoning_content"] = "\n".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    return [*results, turn]


def _message(place: str, turn: Turn) -> Message:
    role, content = turn["role"], turn["content"]
    texts = [part["text"] for part in content if not medium(part)] if isinstance(content, list) else [content]
    if not all(isinstance(text, str) for text in texts):
        raise Refusal(f"{place} needs 'role' and 'content' (text): correct it; got {content!r:.80}")
    calls = calls_of(place, turn)
    keys = _TEMPLATE_KEYS if role != "user" else ()
    more = {key: turn[key] for key in keys if turn.get(key) is not None}
    if not all(isinstance(value, str) for value in more.values()):
        raise Refusal(f"{place}: {' and '.join(more)} must be text: correct or remove it")
    thoughts = [turn[key] for key in _REASONING_KEYS if isinstance(turn.get(key), str)]
    cut = role == "assistant" and _names_a_cut(turn.get("finish_reason"))
    # Templates close a cut call, and reasoning that was cut, as if the target had gone on.
    torn = cut and (bool(calls) or not without_thinking(joined(texts)).strip())
    return Message(
        role,
        joined(texts),
        reasoning=next(filter(None, thoughts), "") if role == "assistant" else "",
        more=more | ({"tool_calls": calls} if calls else {}),
        # SGLang joins the parts of a tool's result for every template.
        texts=tuple(texts) if len(texts) > 1 and role != "tool" else (),
        learned=turn.get("weight") != 0 and not torn,  # OpenAI's fine-tuning format
        cut=cut,
    )


def _shown(record: Mapping[str, Any], turns: Sequence[Turn], messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """The messages with their images; unchanged where a target could not be shown all of the record's media."""
    seen = seen_turns(record, [turn["content"] for turn in turns])
    pairs = list(zip(messages, seen or (), strict=False))
    if any(images and message.role == "assistant" for message, (_, images) in pairs):
        return messages
    if not any(images for _, (_, images) in pairs):
        return messages
    return tuple(replace(one, content=text, images=images) if images else one for one, (text, images) in pairs)
