"""Prompts of benchmarks are found wherever they are hidden, and other text is spared."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.data.benchmark_prompts import BenchmarkPrompts, read_excluded_prompts, words_of

QUESTION = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips did "
    "Natalia sell altogether in April and May?"
)
MEDIUM = "Draft a short email to your landlord about the broken heating."
SHORT = "Who are you?"
PROMPTS = BenchmarkPrompts([QUESTION, MEDIUM, SHORT, QUESTION])


@pytest.mark.parametrize(
    ("message", "found"),
    [
        (QUESTION, True),
        (QUESTION.upper().replace(",", " -"), True),
        (f"Solve this problem. {QUESTION} Think step by step.", True),
        ("In April, and then she sold half as many clips in May. How many clips were there, and who sold them?", True),
        (QUESTION.replace("Natalia", "Nora").replace("48", "90"), True),
        (QUESTION.replace("altogether", "in all"), True),
        ("Please: draft a short email to your landlord about the broken heating. Be polite.", True),
        ("draft a short email to your landlord about the broken heater", True),
        ("draft a short email to your boss about the broken window", False),
        ("who are you", True),
        ("Who are you to say so?", False),
        ("A clip is a device that holds things together.", False),
        ("", False),
    ],
)
def test_exactly_and_nearly(message: str, found: bool) -> None:
    assert PROMPTS.occur_in(["something else", message]) == found
    assert len(PROMPTS) == 3


def test_a_common_instruction_is_no_prompt() -> None:
    """Thirteen words that several prompts share stand in much training text."""
    instruction = "Solve the following problem step by step and put your final answer within a box at the end."
    prompts = BenchmarkPrompts([f"{instruction} What is the sum of {n} and {n + 1} and 7 and 12?" for n in range(5)])
    assert not prompts.occur_in([f"{instruction} Prove that the square root of two is no fraction of whole numbers."])
    assert prompts.occur_in([f"{instruction} What is the sum of 3 and 4 and 7 and 12?"])


def test_writing_without_spaces() -> None:
    prompts = BenchmarkPrompts(["请用三句话介绍一下北京的历史和文化特点"])
    assert prompts.occur_in(["你好!请用三句话介绍一下北京的历史和文化特点。谢谢"])
    assert not prompts.occur_in(["请用三句话介绍一下你自己"])


ASKED = [f"asked{number}" for number in range(60)]
OTHER = [f"other{number}" for number in range(60)]
prompt_words = st.lists(st.sampled_from(ASKED), min_size=1, max_size=40, unique=True)
filler = st.lists(st.sampled_from(OTHER), max_size=60)


@settings(deadline=None)
@given(prompts=st.lists(prompt_words, min_size=1, max_size=6), before=filler, behind=filler, data=st.data())
def test_planted_prompts_are_found(prompts: list[list[str]], before: list[str], behind: list[str], data) -> None:
    known = BenchmarkPrompts(" ".join(words) for words in prompts)
    planted = data.draw(st.sampled_from(prompts))
    separator = data.draw(st.sampled_from([" ", ", ", "\n"]))
    # Where a prompt is short it is found as a message of its own.
    around = (before, behind) if len(planted) >= 8 else ([], [])
    message = separator.join([*around[0], *planted, *around[1]]).upper()
    assert known.occur_in([" ".join(before), message])


@settings(deadline=None)
@given(
    prompts=st.lists(prompt_words, min_size=1, max_size=6),
    parts=st.lists(st.tuples(filler, st.integers(0, 30), st.integers(1, 4)), max_size=6),
)
def test_text_with_no_more_than_four_words_of_a_prompt_in_a_row_is_spared(prompts, parts) -> None:
    known = BenchmarkPrompts(" ".join(words) for words in prompts)
    long = max(prompts, key=len)
    pieces = [[*words, "between", *long[start : start + length]] for words, start, length in parts]
    message = " ".join(word for piece in pieces for word in piece)
    assert not known.occur_in([message, f"{message} end"])


def test_layouts_of_benchmarks_and_of_training_text(tmp_path: Path) -> None:
    records = [
        {"question_id": 1, "category": "writing", "turns": ["one", "two"]},
        {"question": "three", "answer": "no prompt"},
        {"problem": "four", "solution": "no prompt"},
        {"task_id": "x/1", "prompt": "five"},
        {"messages": [{"role": "system", "content": "no prompt"}, {"role": "user", "content": "six"}]},
        {"conversations": [{"from": "human", "value": "seven"}, {"from": "gpt", "value": "no prompt"}]},
        {"text": "eight"},
    ]
    file = tmp_path / "suite.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert list(read_excluded_prompts([str(file)])) == ["one", "two", "three", "four", "five", "six", "seven", "eight"]
    file.write_text('{"answer": "x"}')
    with pytest.raises(ValueError, match=r"suite\.jsonl:1: this record has none of the keys"):
        list(read_excluded_prompts([str(file)]))
    file.write_text('{"input_ids": [1], "loss_mask": [1]}')
    with pytest.raises(ValueError, match=r"suite\.jsonl:1: tokens cannot be compared"):
        list(read_excluded_prompts([str(file)]))


def test_words() -> None:
    assert words_of("It's 3.5 – Été, ПРИВЕТ!") == ("it", "s", "3", "5", "été", "привет")
    assert words_of("日本 is 日") == ("日", "本", "is", "日")
