"""Reading: every form that is understood, and refusals that name the line."""

import json
from pathlib import Path

import fsspec
import pytest

from models.data.conversations import Document, Message, read_documents, source_hash

TURNS = (Message("user", "hi"), Message("assistant", "hello"))


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("record", "messages", "plain"),
    [
        ({"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}, TURNS, False),
        ({"messages": [{"role": "user", "content": "hi"}, {"role": "Assistant", "content": "hello"}]}, TURNS, False),
        ({"text": "some words", "id": 3}, (Message("text", "some words"),), True),
        (
            {
                "system": "be brief",
                "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}],
            },
            (Message("system", "be brief"), *TURNS),
            False,
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]},
            (Message("user", "h i", texts=("h", "i")),),
            False,
        ),
        (
            {"messages": [{"role": "assistant", "content": "4", "reasoning_content": "2 and 2", "tool_calls": None}]},
            (Message("assistant", "4", "2 and 2"),),
            False,
        ),
    ],
)
def test_json_lines(tmp_path: Path, record: dict, messages: tuple[Message, ...], plain: bool) -> None:
    source = write(tmp_path / "a.jsonl", "\n" + json.dumps(record) + "\n\n")
    assert list(read_documents(source)) == [Document(f"{source}:2", messages, plain)]


def test_text_files_are_cut_at_blank_lines(tmp_path: Path) -> None:
    source = write(tmp_path / "a.txt", "\n\none\ntwo\n  \n\nthree\n")
    assert [(d.place, d.text) for d in read_documents(source)] == [
        (f"{source}:3", "one\ntwo"),
        (f"{source}:7", "three"),
    ]


GOOD = '{"text": "fine"}\n'

REFUSALS = {
    "broken JSON": (GOOD + "\n{'text': 1}\n", r"a\.jsonl:3: not valid JSON \(.*column 2\)"),
    "cut JSON": (GOOD + '{"text": "', r"a\.jsonl:2: not valid JSON"),
    "no known key": (
        GOOD + '{"prompt": "x", "id": 1}\n',
        r"a\.jsonl:2: this record has none of the keys .*\['id', 'prompt'\]",
    ),
    "text is no text": ('{"text": 3}\n', r"a\.jsonl:1: this record has none of the keys conversations, messages, text"),
    "not an object": ("[1]\n", r"a\.jsonl:1: write a JSON object with"),
    "no turns": ('{"messages": []}\n', r"a\.jsonl:1: the conversation has no turns"),
    "unknown role": (
        GOOD + '{"messages": [{"role": "narrator", "content": "x"}]}',
        r"a\.jsonl:2: turn 1 has the role 'narrator'",
    ),
    "no role": ('{"messages": [{"value": "x"}]}', r":1: turn 1 needs 'role' and 'content' .*, or 'from' and 'value'"),
    "an unknown part": (
        '{"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}',
        r":1: turn 1 holds a part that is not known: {'type': 'document', 'source': {}}",
    ),
    "turns are no list": ('{"messages": "none"}', r":1: the conversation has no turns"),
    "content is null": ('{"messages": [{"role": "user", "content": null}]}', r":1: turn 1 needs 'role' and 'content'"),
    "a call without a name": (
        '{"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}]}',
        r":1: turn 1 has a tool call without a function's name: {'id': '1'}",
    ),
    "tools are none": ('{"messages": [{"role": "user", "content": "x"}], "tools": "none"}', r":1: tools is not a list"),
    "no mask": ('{"input_ids": [1, 2]}', r":1: input_ids need a loss_mask of the same length"),
    "half a mask": ('{"input_ids": [1, 2], "loss_mask": [1]}', r":1: input_ids need a loss_mask of the same length"),
    "a negative token": ('{"input_ids": [-1], "loss_mask": [1]}', r":1: input_ids are whole numbers from 0"),
    "a doubtful mask": ('{"input_ids": [1], "loss_mask": [2]}', r":1: input_ids are whole numbers from 0"),
    "nested images of an answer": (
        GOOD
        + '{"text": "x", "generated": [{"input_ids": [1], "loss_mask": [1], "images": '
        + "[" * 900
        + "]" * 900
        + "}]}",
        r"a\.jsonl:2: a sample of `generated` needs a whole number as room and a list of addresses as images",
    ),
    "a room in words": (
        GOOD + '{"text": "x", "generated": [{"input_ids": [1], "loss_mask": [1], "room": "much"}]}',
        r"a\.jsonl:2: a sample of `generated` needs a whole number as room",
    ),
    "empty": ("", r"a\.jsonl is empty"),
    "blank": ("\n  \n", r"a\.jsonl is empty"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_name_the_place(tmp_path: Path, case: str) -> None:
    content, message = REFUSALS[case]
    source = write(tmp_path / "a.jsonl", content)
    with pytest.raises(ValueError, match=message):
        list(read_documents(source))


@pytest.mark.parametrize("read", [lambda source: list(read_documents(source)), source_hash])
def test_files_that_cannot_be_read(tmp_path: Path, read) -> None:
    with pytest.raises(ValueError, match="there is no such file"):
        read(str(tmp_path / "missing.jsonl"))
    with pytest.raises(ValueError, match="of no known kind"):
        read(write(tmp_path / "a.csv", "a,b"))


def test_a_file_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"caf\xe9 au lait\n")
    with pytest.raises(ValueError, match="is not UTF-8"):
        list(read_documents(str(path)))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.txt"])
def test_a_byte_order_mark_is_no_text(tmp_path: Path, name: str) -> None:
    text = {"a.jsonl": '{"text": "fine"}', "a.json": '[{"text": "fine"}]', "a.txt": "fine"}[name]
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert [document.text for document in read_documents(str(tmp_path / name))] == ["fine"]


def test_an_answer_that_was_refused_is_not_an_empty_one(tmp_path: Path) -> None:
    turn = {"role": "assistant", "content": "", "refusal": "I will not."}
    source = write(tmp_path / "a.jsonl", json.dumps({"messages": [{"role": "user", "content": "hi"}, turn]}))
    with pytest.raises(ValueError, match=r"a\.jsonl:1: turn 2 needs 'role' and 'content' .*'refusal': 'I will not"):
        list(read_documents(source))


def test_identity_is_the_content(tmp_path: Path) -> None:
    def only(name: str, text: str) -> Document:
        return next(read_documents(write(tmp_path / name, text)))

    sharegpt = only("a.jsonl", '{"conversations": [{"from": "human", "value": "hi "}]}')
    openai = only("b.jsonl", '\n{"messages": [{"role": "user", "content": "hi"}]}')
    text = only("c.txt", "hi")
    assert sharegpt.content_hash == openai.content_hash != text.content_hash
    assert text.content_hash == only("d.jsonl", '{"text": "hi"}').content_hash


def test_the_source_hash_follows_the_bytes(tmp_path: Path) -> None:
    first = source_hash(write(tmp_path / "a.txt", "one"))
    assert first == source_hash(write(tmp_path / "b.txt", "one"))
    assert first != source_hash(write(tmp_path / "c.txt", "two"))
    assert first != source_hash(write(tmp_path / "d.jsonl", "one"))


def test_a_source_elsewhere_is_copied_once_and_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    url = "memory://prompts/one.txt"
    with pytest.raises(ValueError, match="cannot be read"):
        source_hash(url)
    hashes = []
    for text in ("first", "first", "second"):
        fsspec.filesystem("memory").pipe_file("/prompts/one.txt", text.encode())
        assert [document.text for document in read_documents(url)] == [text]
        hashes.append(source_hash(url))
    assert hashes[0] == hashes[1] != hashes[2]


def test_words_are_the_same_whatever_their_case_and_space() -> None:
    def of(text: str) -> Document:
        return Document("", (Message("user", text),), plain=False)

    assert of("What  is it?\n").wording_hash == of("what is it?").wording_hash != of("what is it").wording_hash
    assert of("What is it?").content_hash != of("what is it?").content_hash


def test_tokens(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", '{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "tokenizer_hash": "abc"}')
    (document,) = read_documents(source)
    (tokens,) = document.tokens
    assert tokens.ids.tolist() == [5, 6, 7]
    assert tokens.loss_mask.tolist() == [False, True, True]
    assert tokens.tokenizer_hash == "abc"


def test_regenerated_conversations_have_their_tokens(tmp_path: Path) -> None:
    """Keys of the same name that mean something else are no tokens."""
    samples = '[{"input_ids": [5, 6], "loss_mask": [0, 1]}, {"input_ids": [5, 7, 8], "loss_mask": [0, 1, 1]}]'
    turns = '"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "thinking": "c"}]'
    others = f'{{{turns}, "generated": true}}\n{{{turns}, "generated": [{{"by": "us"}}]}}'
    source = write(tmp_path / "a.jsonl", f'{{{turns}, "generated": {samples}}}\n{others}')
    regenerated, *rest = read_documents(source)
    assert [part.ids.tolist() for part in regenerated.tokens] == [[5, 6], [5, 7, 8]]
    assert not regenerated.plain
    assert regenerated.messages == rest[0].messages == rest[1].messages
    assert regenerated.messages[1].reasoning == "c"
    assert regenerated.content_hash != rest[0].content_hash
    assert [other.tokens for other in rest] == [(), ()]
