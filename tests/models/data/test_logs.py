"""Logs of requests as training text: what the target generated of them, and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest

from models.config.data import DataConfig
from models.data.check import check_data
from models.data.conversations import as_document
from models.data.loss_mask import runs_of
from models.data.samples import SampleEncoder
from tests.models.chat_templates import FAMILIES

ASKED = {"role": "user", "content": "Write a story"}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": {"word": "list"}}}
REASONING = ("qwen3", "qwen3, opened", "r1", "deepseek-v3.1, thinking", "harmony", "glm4.5")


@pytest.fixture
def learned():
    """What is learned of a record with the template of a family, and why others are refused."""

    def learn(record: dict[str, Any], family: str = "chatml", **config: Any) -> tuple[list[str], list[str]]:
        template = FAMILIES[family].open()
        tokenizer: Any = template.tokenizer
        limits = {"source": "log.jsonl", "max_tokens": 4096, "min_tokens": 2, "max_refused_share": 1.0}
        settings = DataConfig(**limits, template_arguments=FAMILIES[family].arguments, **config)
        ends = frozenset(tokenizer.convert_tokens_to_ids(list(FAMILIES[family].ends)))
        encoder = SampleEncoder(tokenizer, settings, add_bos=False, ends=ends)
        samples = list(encoder.encode([as_document("log.jsonl:1", record)]))
        texts = [tokenizer.decode(one.tokens[a:b].tolist()) for one in samples for a, b in runs_of(one.loss_mask)]
        return texts, encoder.counts.refusals

    return learn


def logged(messages: list[dict[str, Any]], reason: str = "stop", **answer: Any) -> dict[str, Any]:
    return {"messages": messages, "choices": [{"message": {"role": "assistant", **answer}, "finish_reason": reason}]}


def turns(*answers: dict[str, Any]) -> list[dict[str, Any]]:
    """Answered questions, and one more."""
    pairs = [[{"role": "user", "content": f"q{n}"}, {"role": "assistant", **one}] for n, one in enumerate(answers)]
    return [*(turn for pair in pairs for turn in pair), ASKED]


@pytest.mark.parametrize("family", REASONING)
def test_answers_that_came_back_without_their_reasoning_are_not_learned(learned, family: str) -> None:
    history = turns({"content": "one"}, {"content": "two"})
    (text,), refused = learned(logged(history, content="three", reasoning_content="hm"), family)
    assert "three" in text
    assert "hm" in text
    assert refused == []


def test_a_target_that_does_not_reason_learns_all_answers(learned) -> None:
    texts, _ = learned(logged(turns({"content": "one"}), content="two", reasoning_content="hm"), "llama3")
    assert len(texts) == 2


@pytest.mark.parametrize(
    ("said", "beside", "expected"),
    [
        ("<think>hm</think>four", {"content": "four", "reasoning_content": "hm"}, "<think>hm</think>four"),
        ("four", {"content": "four"}, "four"),
    ],
)
def test_an_answer_that_a_log_has_twice_is_one(said: str, beside: dict[str, Any], expected: str) -> None:
    record = {"messages": [ASKED, {"role": "assistant", "content": said}], "choices": [{"message": beside}]}
    answered = as_document("log.jsonl:1", record).messages[-1]
    assert (answered.content, answered.reasoning) == (expected, "")


def test_another_answer_beside_an_answered_question_is_not_joined() -> None:
    record = {"messages": [ASKED, {"role": "assistant", "content": "one"}]}
    other = as_document("log.jsonl:1", record | {"response": {"role": "assistant", "content": "two"}})
    assert [message.content for message in other.messages] == [ASKED["content"], "one"]


def test_reasoning_of_the_calls_since_the_last_question_may_be_logged(learned) -> None:
    calling = {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "so"}
    history = [*turns({"content": "one"}), calling, {"role": "tool", "content": "sun", "tool_call_id": "abcdefghi"}]
    texts, _ = learned(logged(history, content="two", reasoning_content="hm"), "qwen3")
    first, second = texts
    assert "so" in first
    assert "hm" in second
    assert "one" not in first + second


@pytest.mark.parametrize(
    ("answers", "count"),
    [
        ([{"content": "one"}, {"content": "two"}, {"content": "three"}], 3),
        ([{"content": "one", "reasoning_content": "hm"}] * 3, 3),
        ([{"content": "<think>hm</think>one"}] * 3, 3),
        ([{"content": "one", "reasoning": "hm"}, {"content": "two"}, {"content": "three", "reasoning": "hm"}], 3),
        ([{"content": "one", "reasoning": "hm"}, {"content": "two", "reasoning": "so"}, {"content": "three"}], 3),
    ],
)
def test_other_answers_are_all_learned(learned, answers: list[dict[str, Any]], count: int) -> None:
    texts, _ = learned({"messages": turns(*answers)[:-1]}, "qwen3")
    assert len(texts) == count


@pytest.mark.parametrize(
    "record",
    [
        logged([ASKED], "length", content="Once upon a time there was e"),
        {"messages": [ASKED], "response": logged([], "abort", content="Once upon a time there was e")},
        {
            "messages": [ASKED],
            "response": {
                "content": [{"type": "text", "text": "Once upon a time there was e"}],
                "stop_reason": "max_tokens",
            },
        },
        {
            "messages": [ASKED, {"role": "assistant", "content": "Once upon a time there was e"}],
            "finish_reason": "length",
        },
    ],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_that_was_cut_is_learned_without_an_end(learned, name: str, record: dict[str, Any]) -> None:
    texts, refused = learned(record, name)
    if name in ("qwen3, opened", "r1", "deepseek-v3.1, thinking"):
        assert not texts
        assert "was cut, perhaps inside the reasoning" in refused[0]
        return
    assert refused == []
    assert texts[0].endswith("Once upon a time there was e")


@pytest.mark.parametrize("name", REASONING)
def test_an_answer_that_was_cut_after_its_reasoning(learned, name: str) -> None:
    texts, refused = learned(logged([ASKED], "length", content="Once upon", reasoning_content="hm"), name)
    assert refused == []
    assert "hm" in texts[0]
    assert texts[0].endswith("Once upon")


@pytest.mark.parametrize(
    "answer",
    [
        {"content": None, "reasoning_content": "I should"},
        {"content": "", "reasoning": "I should"},
        {"content": "<think>\nI should think about"},
        {"content": None, "tool_calls": [CALL]},
    ],
)
@pytest.mark.parametrize("name", ["chatml", *REASONING])
def test_what_was_cut_inside_reasoning_or_a_call_is_not_learned(learned, name: str, answer: dict[str, Any]) -> None:
    assert learned(logged([ASKED], "length", **answer), name) == ([], [])


@pytest.mark.parametrize(
    "record",
    [
        logged([ASKED, {"role": "assistant", "content": "{"}], content='"title": "A"}'),
        {
            "messages": [ASKED, {"role": "assistant", "content": [{"type": "text", "text": "{"}]}],
            "response": {"role": "assistant", "content": [{"type": "text", "text": '"title": "A"}'}]},
        },
        logged([ASKED, {"role": "assistant", "content": "{"}], content='{"title": "A"}') | {"echo": True},
        logged([ASKED, {"role": "assistant", "content": '{"title": "A"}'}], content='{"title": "A"}'),
        {"messages": [ASKED, {"role": "assistant", "content": '{"title": "A"}'}], "response": "another"},
    ],
)
def test_an_answer_that_the_request_begins_is_learned_whole(learned, record: dict[str, Any]) -> None:
    assert learned(record) == (['{"title": "A"}<|im_end|>'], [])


@pytest.mark.parametrize(
    ("said", "family"),
    [
        ("R1 writes `<think>` before its answer.", "qwen3"),
        ("R1 writes `<think>` before its answer.", "qwen3, no thinking"),
        ("R1 writes `<think>` before its answer.", "deepseek-v3.1"),
        ("Use the tags <think> and </think> here.", "chatml"),
    ],
)
def test_an_answer_that_speaks_of_tags(learned, said: str, family: str) -> None:
    (text,), refused = learned({"messages": [ASKED, {"role": "assistant", "content": said}]}, family)
    assert refused == []
    assert said in text


def test_the_check_counts_them(tmp_path: Path) -> None:
    records = [
        logged(turns({"content": "one"}), content="two", reasoning_content="hm"),
        logged([ASKED], "length", content="Once upon"),
        logged([ASKED], "length", content=None, reasoning_content="hm"),
        logged([ASKED], content="Once upon a time."),
    ]
    (tmp_path / "log.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    config = DataConfig(source=str(tmp_path / "log.jsonl"))
    earlier, end, inside = check_data(config).warnings
    assert earlier.startswith("1 conversation with reasoning before the last answer alone")
    assert end == "1 conversation with an answer that was cut: it is learned without an end"
    assert inside.startswith("1 conversation with an answer that was cut inside its reasoning")
    assert len(check_data(config.model_copy(update={"thinking": "strip"})).warnings) == 2
