"""Tools and tool calls of a record, in the form in which SGLang hands them to chat templates."""

import json
from collections.abc import Mapping
from typing import Any

from infra.refusal import Refusal

MAX_DEPTH = 64
"""Nesting levels of tools and their arguments."""
_FUNCTION_KEYS = ("description", "name", "parameters", "strict", "defer_loading")
"""What SGLang keeps of a function, in its order."""
_ALWAYS = ("description", "name", "parameters")
"""Shown as null where the request lacks them."""


def without_nulls(value: Any) -> Any:
    """A value of a Parquet file without the nulls that its columns add to objects of several shapes."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list) and isinstance(next((one for one in value if one is not None), None), dict | list):
        return [without_nulls(item) for item in value]
    return value


def parsed(value: Any) -> Any:
    """The value of JSON text, anything else unchanged; Parquet files keep objects of many shapes as text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def tools_of(place: str, record: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The tools that the assistant may call (`tools`, or `functions` of OpenAI's API before tools).

    Raises Refusal: no list of JSON objects.
    """
    tools = parsed(record.get("tools")) or parsed(record.get("functions")) or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Refusal(
            f"{place}: tools is not a list of JSON objects (or the JSON text of one): correct it, or leave the key out"
        )
    for tool in tools:
        check_json(f"{place}: tools", tool)
    return tuple(_served(tool) for tool in tools)


def _served(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tool as SGLang 0.5.23 hands it to templates (`Tool.model_dump` in its openai/protocol.py).

    Keys that it does not know are dropped, those of the request keep their order, and description, parameters and
    defer_loading are shown as null where the request lacks them.
    """
    function = tool.get("function")
    if function is None and "name" in tool:
        # `functions`, and Anthropic's tools, have nothing around the function.
        schema = {"parameters": tool["input_schema"]} if "input_schema" in tool else {}
        tool, function = {}, {**tool, **schema}
    if not isinstance(function, dict):
        return tool  # a server's own tool, which SGLang refuses
    deferred = tool.get("defer_loading")
    values = {key: function.get(key) for key in _FUNCTION_KEYS}
    if values["defer_loading"] is None:
        values["defer_loading"] = deferred
    order = dict.fromkeys((*(key for key in function if key in values), *_FUNCTION_KEYS))
    shown = {key: values[key] for key in order if key in _ALWAYS or values[key] is not None}
    return {"type": tool.get("type") or "function", "function": shown, "defer_loading": deferred}


def calls_of(place: str, turn: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A turn's tool calls as SGLang 0.5.23 hands them to templates: arguments as an object, `id` and `index` or null.

    Raises Refusal: a call without a function's name, or arguments that are not JSON.
    """
    calls: list[dict[str, Any]] = []
    old = parsed(turn.get("function_call"))  # of OpenAI's API before tools
    given = parsed(turn.get("tool_calls")) or ([old] if old else [])
    if not isinstance(given, list):
        raise Refusal(f"{place}: tool_calls is not a list: {given!r:.80}. Correct it, or leave the key out")
    for call in given:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise Refusal(f"{place} has a tool call without a function's name: {call!r:.80}. Correct or remove it")
        arguments = parsed(function.get("arguments")) or {}
        known = {key: call.get(key) for key in ("id", "index")}
        check_json(f"{place}: tool_calls", [arguments, known])
        calls.append({**known, "type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return calls


def check_json(place: str, value: Any, depth: int = 0) -> None:
    """Raise Refusal for values that templates cannot render: too deep, or (in Parquet files) not JSON."""
    if depth > MAX_DEPTH:
        raise Refusal(f"{place}: nested more than {MAX_DEPTH} levels deep: flatten or remove it")
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            check_json(place, part, depth + 1)
    elif not (value is None or isinstance(value, str | int | float)):
        raise Refusal(f"{place}: holds a {type(value).__name__}, which JSON does not have: write it as text")
