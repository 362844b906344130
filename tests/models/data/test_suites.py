import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from models.data.hub import parse
from models.data.prompts import OWN_SUITE, SUITES, find_suite_format, question_prompts, read_questions, suite_address

TEMPLATE = "{% for m in messages %}<u> {{ m.content }} {% endfor %}{% if add_generation_prompt %}<a> {% endif %}"
RECORDS = {
    "spec-bench": {"question_id": 81, "category": "writing", "turns": ["one two", "three"]},
    "mt-bench": {"prompt_id": 3, "category": "writing", "prompt": ["one two", "three"], "reference": []},
    "gsm8k": {"question": "one two", "answer": "#### 3"},
    "humaneval": {"task_id": "HumanEval/0", "prompt": "one two", "test": "", "entry_point": "f"},
    "math500": {"problem": "one two", "solution": "", "answer": "", "subject": "Algebra", "level": 2, "unique_id": ""},
}  # fmt: skip
CATEGORIES = {"spec-bench": "mt_bench", "mt-bench": "writing", "math500": "Algebra"}


def write(path: Path, *records: object) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that knows numbers as words."""
    folder = tmp_path_factory.mktemp("target")
    words = {word: number for number, word in enumerate(["<s>", "<u>", "<a>", *(f"w{n}" for n in range(40))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", chat_template=TEMPLATE).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", SUITES)
def test_layouts(name: str, tmp_path: Path):
    source = write(tmp_path / "suite.jsonl", RECORDS[name])
    layout = find_suite_format(name, source)
    assert layout is SUITES[name]
    assert layout is find_suite_format("any", name)
    (question,) = read_questions(source, layout)
    assert (question.text, question.category) == ("one two", CATEGORIES.get(name))
    assert question.place.endswith("suite.jsonl:1")
    assert suite_address(source) == source
    address = suite_address(name)
    assert address.startswith("https://") or parse(address).repository


def test_suites_of_ones_own(tmp_path: Path):
    source = write(tmp_path / "own.jsonl", {"question": "a b", "category": "x"}, {"problem": "c"})
    assert find_suite_format("mine", source) is OWN_SUITE
    assert [(q.text, q.category) for q in read_questions(source, OWN_SUITE)] == [("a b", "x"), ("c", None)]
    assert find_suite_format("mine", write(tmp_path / "text.jsonl", {"text": "a b"})) is None


@pytest.mark.parametrize(
    ("name", "record", "said"),
    [
        ("gsm8k", {"problem": "a"}, r":2: no question .*its keys are \['problem'\]. Correct the record"),
        ("gsm8k", {"question": " "}, ":2: no question"),
        ("spec-bench", {"turns": [], "category": "a"}, ":2: no turns"),
        ("spec-bench", {"turns": [3], "category": "a"}, ":2: no turns"),
        ("math500", {"problem": "a"}, "'subject' has to be the category .* fetch the suite from hf://"),
        ("mt-bench", ["a"], ":2: write a JSON object with"),
    ],
)
def test_refusals_name_the_line_and_the_remedy(name: str, record: object, said: str, tmp_path: Path):
    source = write(tmp_path / "suite.jsonl", RECORDS[name], record)
    with pytest.raises(ValueError, match=said):
        list(read_questions(source, SUITES[name]))


def ask(source: str, target: Path, **more: int | bool | str):
    layout = find_suite_format("own", source)
    assert layout is not None
    options = {"count": 10, "prompt_tokens": 6, "chat_template": "none", "add_bos": False} | more
    return question_prompts(source, layout, target, **options)  # type: ignore[arg-type]


def test_prompts_are_spread_over_the_categories(target: Path, tmp_path: Path):
    many = [{"question": f"w{n} w{n + 1}", "category": "many"} for n in range(8)]
    few = [{"question": f"w{n} w1", "category": "few"} for n in (20, 21)]
    source = write(tmp_path / "s.jsonl", *many, *few, {"question": "w1 " * 7, "category": "long"}, many[0])
    found = ask(source, target, count=5)
    assert found.categories == ("many", "few", "many", "few", "many")
    assert found.prompts == [[3, 4], [23, 4], [4, 5], [24, 4], [5, 6]]
    assert (found.too_long, found.template_hash) == (1, "none")
    assert len(ask(source, target).prompts) == 10, "the repeated one counts once"
    with pytest.raises(ValueError, match="0 of 12 questions give a prompt of 2 to 1 tokens: raise"):
        ask(source, target, prompt_tokens=1)


def test_a_question_is_asked_by_the_template_or_continued(target: Path, tmp_path: Path):
    source = write(tmp_path / "s.jsonl", {"question": "w1 w2"}, {"question": "w3"})
    asked = ask(source, target, chat_template="tokenizer")
    assert asked.prompts == [[1, 4, 5, 2], [1, 6, 2]]
    assert asked.categories == ()
    assert len(asked.template_hash) == 64
    assert ask(source, target, add_bos=True).prompts == [[0, 4, 5], [0, 6]]


def test_the_hash_follows_the_content(target: Path, tmp_path: Path):
    records = [{"question": "w1 w2"}, {"question": "w3 w4"}]
    first = ask(write(tmp_path / "a.jsonl", *records), target)
    assert ask(write(tmp_path / "b.jsonl", *records), target) == first
    assert ask(write(tmp_path / "b.jsonl", *reversed(records)), target).dataset_hash != first.dataset_hash


@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=4), count=st.integers(2, 20))
def test_no_category_is_ahead_of_another_by_more_than_one(
    sizes: list[int], count: int, target: Path, tmp_path_factory: pytest.TempPathFactory
):
    records = [{"question": f"w{c} w{n}", "category": str(c)} for c, size in enumerate(sizes) for n in range(size)]
    if len(records) < 2:
        return
    found = ask(write(tmp_path_factory.mktemp("s") / "s.jsonl", *records), target, count=count)
    assert len(found.prompts) == min(count, len(records))
    taken = [found.categories.count(str(c)) for c in range(len(sizes))] if found.categories else [len(found.prompts)]
    whole = [size for size, number in zip(sizes, taken, strict=False) if number == size]
    cut = [number for size, number in zip(sizes, taken, strict=False) if number < size]
    assert max(cut, default=0) - min(cut, default=0) <= 1
    assert not cut or max(whole, default=0) <= max(cut) + 1
