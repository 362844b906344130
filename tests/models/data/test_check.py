"""The check of a source before a run, and the records that may be left out."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infra.refusal import Refusal
from models.config.data import DataConfig
from models.data.check import check_data
from models.data.conversations import training_documents
from models.data.preview import preview

TALK = {"messages": [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A test, Sir."}]}
ASKED = {"messages": [{"role": "user", "content": "And now?"}]}
BROKEN = (
    '{"messages": [', '{"prompt": "a", "completion": "b"}', '{"messages": []}', "[1, 2]", "not json",
    '{"messages": [{"role": "robot", "content": "x"}]}', '{"messages": [{"role": "user"}]}', '{"messages": "x"}',
)  # fmt: skip


@pytest.fixture
def source(tmp_path: Path):
    def write(*lines: object) -> str:
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        (tmp_path / "talk.jsonl").write_text("\n".join(texts) + "\n")
        return str(tmp_path / "talk.jsonl")

    return write


def test_every_broken_record_is_listed_and_the_rest_counted(source) -> None:
    file = source(*BROKEN[:4], TALK, *BROKEN[4:], *[TALK] * 40)
    checked = check_data(DataConfig(source=file))
    assert checked.kinds == {"conversation": 41}
    assert checked.roles == {"user": 41, "assistant": 41}
    assert [fault.split(": ")[0] for fault in checked.broken] == [f"{file}:{n}" for n in (1, 2, 3, 4, 6, 7, 8, 9)]
    lines = list(checked.lines())
    assert len(lines) == 9
    assert lines[-1] == "data: 41 conversations (turns: 41 assistant, 41 user); 8 broken records left out"


def test_files_that_are_read_and_left_out_are_counted(tmp_path: Path) -> None:
    for name in ("a.jsonl", "deep/b.NDJSON", "old.json", "older.txt", "README.md", "LICENSE", ".hidden.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(TALK) + "\n")
    assert list(check_data(DataConfig(source=str(tmp_path))).lines()) == [
        "files: 2 read (.jsonl); left out: 2 of another kind (.json, .txt) and 2 of an unknown kind (no suffix, .md)",
        "data: 2 conversations (turns: 2 assistant, 2 user)",
    ]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from([None, *BROKEN]), min_size=1, max_size=40), st.floats(0, 1))
def test_what_is_kept_and_what_is_refused(source, lines: list[str | None], share: float) -> None:
    file = source(*(TALK if line is None else line for line in lines))
    broken = sum(line is not None for line in lines)
    faults: list[str] = []
    documents = training_documents(DataConfig(source=file, max_broken_share=share), faults)
    if broken > share * len(lines):
        with pytest.raises(Refusal, match=r"cannot be used|jsonl:\d+: "):
            list(documents)
    else:
        assert len(list(documents)) == len(lines) - broken
        assert len(faults) == broken


@pytest.mark.parametrize("stray", [{"text": "stray"}, {"input_ids": [1, 2], "loss_mask": [0, 1]}])
def test_a_record_of_another_kind_is_a_broken_one(source, stray: dict[str, Any]) -> None:
    file = source(*[TALK] * 9, stray)
    checked = check_data(DataConfig(source=file))
    assert checked.kinds == {"conversation": 9}
    (fault,) = checked.broken
    kind = "plain text" if "text" in stray else "token record"
    assert fault.startswith(f"{file}:10: a {kind}, and the first record ({file}:1) is a conversation: make two")
    whole = check_data(DataConfig(source=file, chat_template="none"))
    assert whole.kinds == {"conversation": 9} | ({"plain text": 1} if "text" in stray else {})


def test_conversations_without_a_mask_are_warned_of(source) -> None:
    checked = check_data(DataConfig(source=source(TALK, TALK), chat_template="none"))
    assert "2 conversations would be learned whole" in checked.warnings[0]
    (warning,) = check_data(DataConfig(source=source(TALK, ASKED))).warnings
    assert "1 conversation without a turn of the assistant" in warning


def test_plain_text_for_a_chat_template_is_refused_at_once(source) -> None:
    with pytest.raises(Refusal, match=r"talk\.jsonl:1: plain text has no turns.* set data\.chat_template=none"):
        check_data(DataConfig(source=source({"text": "Only words."})))


def test_a_preview_shows_what_is_learned(source, make_tokenizer, template: str, tmp_path: Path) -> None:
    make_tokenizer(template).save_pretrained(tmp_path / "tokenizer")
    config = DataConfig(source=source(TALK, BROKEN[0]), max_broken_share=1.0)
    title, *parts = [text.plain for text in preview(config, tmp_path / "tokenizer", samples=3)]
    assert title.startswith("sample 1: ")
    learned = "".join(part for part in parts if part.startswith("learned | "))
    context = "".join(part for part in parts if part.startswith("context | "))
    assert "A test, Sir." in learned
    assert "A test" not in context
    assert "What is it?" in context


def test_a_preview_cannot_move_the_terminal_s_cursor(source, make_tokenizer, template: str, tmp_path: Path) -> None:
    make_tokenizer(template).save_pretrained(tmp_path / "tokenizer")
    cleared = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y\x1b[2J\ty"}]}
    shown = "".join(
        text.plain for text in preview(DataConfig(source=source(cleared)), tmp_path / "tokenizer", samples=1)
    )
    assert "y\\x1b[2J\ty" in shown
    assert "\x1b" not in shown


def test_a_preview_without_a_tokenizer_is_refused(source, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="holds no tokenizer"):
        list(preview(DataConfig(source=source(TALK)), tmp_path / "nothing", samples=1))
