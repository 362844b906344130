"""Tools and tool calls: read in every form, and shown to templates as SGLang shows them."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from infra.sglang.command import sglang_python
from models.data.chat_template import open_chat_template, reads_parts
from models.data.conversations import Document, read_documents
from tests.models.chat_templates import CHATML, FAMILIES, make_tokenizer

TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}
SERVED = {"type": "function", "function": {"name": "add", "parameters": {}, "description": None}, "defer_loading": None}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def documents(path: Path, *records: dict[str, Any]) -> list[Document]:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return list(read_documents(str(path)))


def called(call: Any, key: str = "tool_calls", content: str | None = "") -> dict[str, Any]:
    asked = {"role": "user", "content": "1 and 1?", "tool_calls": None, "name": None}
    result = {"role": "tool", "content": "2", "tool_call_id": "c1"}
    return {"messages": [asked, {"role": "assistant", "content": content, key: call}, result]}


def test_tools_and_calls_in_every_form(tmp_path: Path) -> None:
    """Arguments are objects for templates, whatever the record holds."""
    parsed = {"id": "c1", "function": {"name": "add", "arguments": {"a": 1}}, "type": "function"}
    one, other = documents(
        tmp_path / "a.jsonl",
        {**called([CALL], content=None), "tools": [TOOL]},
        {**called(json.dumps([parsed])), "tools": json.dumps([TOOL])},
    )
    assert one.content_hash == other.content_hash
    assert one.messages == other.messages
    assert one.messages[1].as_dict() == {
        "role": "assistant", "content": "",
        "tool_calls": [{"type": "function", "id": "c1", "index": None,
                        "function": {"name": "add", "arguments": {"a": 1}}}],
    }  # fmt: skip
    assert one.messages[0].as_dict() == {"role": "user", "content": "1 and 1?"}
    assert one.messages[2].as_dict() == {"role": "tool", "content": "2", "tool_call_id": "c1"}
    assert one.tools == other.tools == (SERVED,)


def test_functions_are_tools(tmp_path: Path) -> None:
    """OpenAI's API before tools."""
    function = {"name": "add", "arguments": '{"a": 1}'}
    old, new = documents(
        tmp_path / "a.jsonl",
        {**called(function, "function_call", None), "functions": [TOOL["function"]]},
        {**called([{"type": "function", "function": function}]), "tools": [TOOL]},
    )
    assert old.messages == new.messages
    assert old.tools == new.tools == (SERVED,)


NULLS = {"type": "object", "properties": {"x": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}}}


def test_nulls_stay_in_json(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": NULLS}}
    calls = [{"function": {"name": "f", "arguments": given}} for given in ({"x": None}, '{"x": null}')]
    (document,) = documents(tmp_path / "a.jsonl", {**called(calls), "tools": [tool]})
    assert document.tools[0]["function"]["parameters"] == NULLS
    made = document.messages[1].more["tool_calls"]
    assert [call["function"]["arguments"] for call in made] == [{"x": None}] * 2


def test_nulls_of_parquet_are_no_values(tmp_path: Path) -> None:
    """Its columns give every object the keys of all; JSON text in them keeps its own nulls."""
    calls = [{"function": {"name": "f", "arguments": given}} for given in ({"x": 1}, {"y": 2})]
    tool = {"type": "function", "function": {"name": "f", "parameters": NULLS}}
    records = [{**called([call]), "tools": json.dumps([tool])} for call in calls]
    parquet.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    read = list(read_documents(str(tmp_path / "a.parquet")))
    made = [document.messages[1].more["tool_calls"][0]["function"]["arguments"] for document in read]
    assert made == [{"x": 1}, {"y": 2}]
    assert read[0].tools[0]["function"]["parameters"] == NULLS


SGLANG = """
import json, sys
from pydantic import TypeAdapter
from sglang.srt.entrypoints.openai.protocol import ChatCompletionMessageParam, Tool
from sglang.srt.entrypoints.openai.serving_chat import normalize_assistant_tool_call_arguments, normalize_tool_content
from sglang.srt.parser.jinja_template_utils import (
    detect_jinja_template_content_format, process_content_for_template_format
)

request, templates = json.loads(sys.argv[1]), json.loads(sys.argv[2])
messages = [TypeAdapter(ChatCompletionMessageParam).validate_python(one).model_dump() for one in request["messages"]]
shown = {}
for form in ("string", "openai"):
    shown[form] = []
    for message in json.loads(json.dumps(messages)):
        normalize_assistant_tool_call_arguments(message)
        message["content"] = "" if message["content"] is None else message["content"]
        message = process_content_for_template_format(message, form, [], [], [], [])
        message["content"] = normalize_tool_content(message["role"], message["content"])
        shown[form].append(message)
print(json.dumps({
    "tools": [Tool(**tool).model_dump() for tool in request["tools"]],
    "messages": shown,
    "formats": {name: detect_jinja_template_content_format(text) for name, text in templates.items()},
}))
"""
TEXTS = [{"type": "text", "text": "Context: A"}, {"type": "text", "text": "Question: B"}]
REQUEST: dict[str, Any] = {
    "tools": [
        {"type": "function", "function": {"name": "f", "parameters": NULLS}},
        {"type": "function", "function": {"strict": True, "name": "g", "description": "d", "x": 1}, "y": 2},
        {"function": {"parameters": None, "strict": False, "name": "h", "defer_loading": None}},
        {"type": "function", "function": {"name": "i", "description": "d"}, "defer_loading": True},
    ],
    "messages": [
        {"role": "system", "content": TEXTS},
        {"role": "user", "content": TEXTS, "name": "jo"},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": null, "y": {"z": null}}'}},
            {"type": "function", "function": {"name": "g", "arguments": {"x": None}}},
        ]},
        {"role": "tool", "content": TEXTS, "tool_call_id": "1", "name": "f"},
        {"role": "assistant", "content": "B"},
        {"role": "user", "content": "Thanks"},
    ],
}  # fmt: skip
PRINT = "{{ {'messages': messages, 'tools': tools} | tojson }}"
TEMPLATES = {
    **{name: family.template for name, family in FAMILIES.items()},
    "string": PRINT,
    "openai": PRINT + "{% for m in messages %}{% for part in m.content %}{% endfor %}{% endfor %}",
    "filter": "{% for message in messages %}{% for c in message['content'] | list %}{% endfor %}{% endfor %}",
    "slice": "{% for message in messages %}{% for c in message.content[1:] %}{% endfor %}{% endfor %}",
    "other name": "{% for turn in messages %}{% for c in turn.content %}{% endfor %}{% endfor %}",
    "method": "{% for m in messages %}{% for c in m.content.split() %}{% endfor %}{% endfor %}",
    "media": "{# an image #}" + CHATML,
}


@pytest.fixture(scope="module")
def served(sglang_that_forks: None) -> dict[str, Any]:
    """What SGLang's own classes make of `REQUEST` and `TEMPLATES`."""
    done = subprocess.run(
        [sglang_python(), "-c", SGLANG, json.dumps(REQUEST), json.dumps(TEMPLATES)],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_templates_that_read_parts_are_those_of_sglang(served: dict[str, Any]) -> None:
    assert {name: "openai" if reads_parts(text) else "string" for name, text in TEMPLATES.items()} == served["formats"]


@pytest.mark.parametrize("form", ["string", "openai"])
def test_templates_see_what_sglang_shows(form: str, served: dict[str, Any], tmp_path: Path) -> None:
    (document,) = documents(tmp_path / "a.jsonl", REQUEST)
    template = open_chat_template(make_tokenizer(TEMPLATES[form]))
    assert template is not None
    shown = json.loads(template.render([message.as_dict() for message in document.messages], document.tools))
    # transformers 5.24, which renders here, gives templates `thinking` as another name of `reasoning_content`.
    messages = [{key: value for key, value in one.items() if key != "thinking"} for one in shown["messages"]]
    assert messages == served["messages"][form]
    # Templates print tools with the keys in their order.
    assert [json.dumps(tool) for tool in shown["tools"]] == [json.dumps(tool) for tool in served["tools"]]


def test_functions_alone_where_a_template_fails_on_tools() -> None:
    """As SGLang does."""
    text = "{% for tool in tools %}{{ tool.name + ' ' }}{% endfor %}" + CHATML
    template = open_chat_template(make_tokenizer(text))
    assert template is not None
    assert template.render([{"role": "user", "content": "a"}], [TOOL]).startswith("add <|im_start|>user\na")
