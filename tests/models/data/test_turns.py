"""Turns in the forms in which data sets and logs hold them."""

import json
from pathlib import Path
from typing import Any

import pytest

from models.data.conversations import Document, read_documents
from models.data.message import Message

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
TURNS = (Message("user", "hi"), Message("assistant", "hello"))
CALL = {"id": None, "index": None, "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
CALLED = (Message("user", "hi"), Message("assistant", "", more={"tool_calls": [CALL]}), Message("tool", "3"))
CALLING = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}
FORMS: dict[str, tuple[dict[str, Any], tuple[Message, ...]]] = {
    "SpecForge": ({"id": 1, "conversations": [USER, ANSWER]}, TURNS),
    "ShareGPT's keys in messages": ({"messages": [{"from": "human", "value": "hi"}, ANSWER]}, TURNS),
    "JSON text": ({"messages": json.dumps([USER, ANSWER])}, TURNS),
    "LMSYS": ({"conversation": [USER, ANSWER], "language": "English"}, TURNS),
    "an empty list beside turns": ({"conversations": [], "messages": [USER, ANSWER]}, TURNS),
    "LLaMA-Factory's calls": (
        {"conversations": [
            {"from": "human", "value": "hi"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
            {"from": "observation", "value": "3"},
        ]},
        CALLED,
    ),
    "Llama's results": ({"messages": [USER, CALLING, {"role": "ipython", "content": "3"}]}, CALLED),
    "a result that is an object": (
        {"messages": [USER, CALLING, {"role": "tool", "content": {"a": "ö"}}]},
        (*CALLED[:2], Message("tool", '{"a": "ö"}')),
    ),
    "a result that is a list": (
        {"messages": [USER, CALLING, {"role": "tool", "content": [{"text": "ö", "score": 1}]}]},
        (*CALLED[:2], Message("tool", '[{"text": "ö", "score": 1}]')),
    ),
    "Anthropic's parts": (
        {"system": [{"type": "text", "text": "be brief"}], "messages": [
            USER,
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t", "name": "f", "input": {"x": 1}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "3"}]},
                {"type": "text", "text": "And?"},
            ]},
            {"role": "assistant", "content": [{"type": "text", "text": "3"}]},
        ]},
        (
            Message("system", "be brief"),
            Message("user", "hi"),
            Message("assistant", "I look.", "hm", more={"tool_calls": [CALL | {"id": "t"}]}),
            Message("tool", "3", more={"tool_call_id": "t"}),
            Message("user", "And?"),
            Message("assistant", "3"),
        ),
    ),
    "system beside messages": (
        {"system": "be brief", "messages": [USER, ANSWER]}, (Message("system", "be brief"), *TURNS),
    ),
    "system beside and in the turns": (
        {"system": "be brief", "conversations": [
            {"from": "system", "value": "be brief"}, {"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}
        ]},
        (Message("system", "be brief"), *TURNS),
    ),
    "an answer in choices": ({"messages": [USER], "choices": [{"message": ANSWER}]}, TURNS),
    "an answer in a response": (
        {"messages": [USER], "response": json.dumps({"choices": [{"message": ANSWER}]})}, TURNS,
    ),
    "a response that is a message": (
        {"messages": [USER], "response": {"content": [{"type": "text", "text": "hello"}], "role": "assistant"}}, TURNS,
    ),
    "a response that is a text": ({"messages": [USER], "response": "hello"}, TURNS),
    "an answer after answered turns": (
        {"messages": [USER, ANSWER, USER], "choices": [{"message": {"content": "again"}}]},
        (*TURNS, TURNS[0], Message("assistant", "again")),
    ),
    "no answer in choices": ({"messages": [USER], "choices": [{"message": {"content": None}}]}, TURNS[:1]),
    "choices of a questionnaire": ({"messages": [USER, ANSWER], "choices": ["A", "B"]}, TURNS),
    "several texts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]}]},
        (Message("user", "A B", texts=("A", "B")),),
    ),
    "OpenAI's weights": (
        {"messages": [USER, {**ANSWER, "weight": 0}, USER, {**ANSWER, "weight": 1}]},
        (TURNS[0], Message("assistant", "hello", learned=False), *TURNS),
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str, tmp_path: Path) -> None:
    record, messages = FORMS[form]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(record))
    assert list(read_documents(str(path))) == [Document(f"{path}:1", messages, plain=False)]


def test_an_empty_list_beside_text(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"messages": [], "text": "words"}')
    (document,) = read_documents(str(path))
    assert (document.plain, document.text) == (True, "words")
