"""Suites of questions, each of a category: the well-known ones by name, and files of the same form.

Used by the processes that prepare samples (whose questions must not be trained on) and by benchmarks.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from infra.refusal import Refusal
from models.config.data import RegenerationConfig
from models.data.conversations import Document, Message, read_records, source_hash
from models.data.dialogue import Dialogue, Prompter
from models.data.reading import converted, whole
from models.data.samples import chat_template

_MULTI_TURN = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


@dataclass(frozen=True)
class SuiteFormat:
    """How the records of a suite say what is asked, and of which category it is."""

    title: str
    address: str
    """Where the suite lies, as `data.source` names it."""
    asked: tuple[str, ...]
    """The field of the question, the first of these that a record has: a text, or turns of which the first is asked."""
    category: str | None = None
    """The field of the category; None: all are of one."""
    grouped: Mapping[str, str] = field(default_factory=dict)
    """Categories that the suite's own tables show as one."""


SUITES: Mapping[str, SuiteFormat] = {
    "spec-bench": SuiteFormat(
        "Spec-Bench (arXiv 2401.07851)",
        "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl",
        ("turns",),
        "category",
        dict.fromkeys(_MULTI_TURN, "mt_bench"),
    ),
    "mt-bench": SuiteFormat(
        "MT-Bench (arXiv 2306.05685)", "hf://datasets/HuggingFaceH4/mt_bench_prompts", ("turns", "prompt"), "category"
    ),
    "gsm8k": SuiteFormat(
        "GSM8K (arXiv 2110.14168)", "hf://datasets/openai/gsm8k?config=main&split=test", ("question",)
    ),
    "humaneval": SuiteFormat(
        "HumanEval (arXiv 2107.03374)", "hf://datasets/openai/openai_humaneval?split=test", ("prompt",)
    ),
    "math500": SuiteFormat(
        "MATH-500 (arXiv 2305.20050)", "hf://datasets/HuggingFaceH4/MATH-500?split=test", ("problem",), "subject"
    ),
}
OWN = SuiteFormat("a suite of questions", "", ("turns", "question", "problem", "prompt"), "category")
"""A file of one's own: `category` is optional there."""


@dataclass(frozen=True)
class Question:
    """What is asked first, and where it stands."""

    place: str
    text: str
    category: str | None


@dataclass(frozen=True)
class SuitePrompts:
    """Token ids of a suite's prompts, each with its category where there are categories."""

    prompts: list[list[int]]
    categories: tuple[str, ...]
    """By prompt; empty: no categories."""
    dataset_hash: str
    """Of the suite's content."""
    template_hash: str
    too_long: int = 0
    """Questions left out because of their length."""


def suite_address(source: str) -> str:
    """Where a suite lies: what a well-known name stands for, or the source itself."""
    return SUITES[source].address if source in SUITES else source


def find_suite_format(name: str, source: str) -> SuiteFormat | None:
    """The layout that a suite's source or name stands for, or its first record shows; None: conversations or text."""
    known = SUITES.get(source) or SUITES.get(name)
    if known is not None:
        return known
    _, record = next(iter(read_records(source)))
    record = whole(record)
    return OWN if isinstance(record, dict) and any(record.get(key) for key in OWN.asked) else None


def read_questions(source: str, layout: SuiteFormat) -> Iterator[Question]:
    """Every question of a suite in its order.

    Raises:
        Refusal: a source that cannot be read, or (with file and line) a record without question or category.
    """
    yield from converted(read_records(suite_address(source)), lambda place, record: _question(place, record, layout))


def _question(place: str, record: Any, layout: SuiteFormat) -> Question:
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise Refusal(f"{place}: write a JSON object with {' or '.join(layout.asked)} in place of this {kind}")
    value = next((record[key] for key in layout.asked if record.get(key)), None)
    text = value[0] if isinstance(value, list) and value else value
    if not isinstance(text, str) or not text.strip():
        raise Refusal(
            f"{place}: no {' or '.join(layout.asked)} (a text, or turns) in this record of {layout.title}; its keys "
            f"are {sorted(record)}. Correct the record, or give a suite of conversations or text another name"
        )
    return Question(place, text, _category(place, record, layout))


def _category(place: str, record: Mapping[str, Any], layout: SuiteFormat) -> str | None:
    if layout.category is None or (layout is OWN and record.get(layout.category) is None):
        return None
    category = record.get(layout.category)
    if not isinstance(category, str) or not category.strip():
        raise Refusal(
            f"{place}: {layout.category!r} has to be the category of this record of {layout.title}, and is "
            f"{category!r:.40}: correct the record, or fetch the suite from {layout.address or 'its source'}"
        )
    return layout.grouped.get(category, category)


def question_prompts(
    source: str, layout: SuiteFormat, target: Path, *, count: int, prompt_tokens: int, templated: bool, add_bos: bool
) -> SuitePrompts:
    """Different prompts, spread evenly over the categories, in the suite's order within each.

    With a chat template the first turn is asked of the target, without one its text is continued; a prompt of more than
    `prompt_tokens` tokens is left out, because a cut question is another one.

    Raises:
        Refusal: what cannot be read, no chat template, or fewer than two prompts.
    """
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(target)
    # One token more than is kept, so that plain text that is too long shows.
    prompter = Prompter(
        tokenizer, RegenerationConfig(prompt_tokens=prompt_tokens + 1), templated=templated, add_bos=add_bos
    )
    questions = list(read_questions(source, layout))
    found: dict[tuple[int, ...], Question] = {}
    too_long = 0
    for question in _in_turn(questions):
        prompt = _tokens(prompter, question, templated)
        if len(prompt) > prompt_tokens:
            too_long += 1
        elif len(prompt) > 1:
            found.setdefault(tuple(prompt), question)
        if len(found) == count:
            break
    if len(found) < 2:
        raise Refusal(
            f"{len(found)} of {len(questions)} questions give a prompt of 2 to {prompt_tokens} tokens: raise the "
            "longest prompt, or give another suite"
        )
    categories = tuple(question.category or "" for question in found.values())
    template = "none" if not templated else _hash(chat_template(tokenizer))
    content = source_hash(suite_address(source))
    # Where all are of one category, the suite's own figure is that category's.
    several = len(set(categories)) > 1
    return SuitePrompts(list(map(list, found)), categories if several else (), content, template, too_long)


def _in_turn(questions: Iterable[Question]) -> Iterator[Question]:
    """One of each category, then the next of each."""
    by_category: dict[str | None, list[Question]] = {}
    for question in questions:
        by_category.setdefault(question.category, []).append(question)
    for row in zip_longest(*by_category.values()):
        yield from (question for question in row if question is not None)


def _tokens(prompter: Prompter, question: Question, templated: bool) -> list[int]:
    role = "user" if templated else "text"
    dialogue = Dialogue(Document(question.place, (Message(role, question.text),), plain=not templated))
    dialogue.advance()
    return prompter.prompt(dialogue)


def _hash(template: str) -> str:
    return hashlib.sha256(json.dumps([template]).encode()).hexdigest()
