"""Benchmark prompts from held-out samples, files, and suites of questions with categories."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from infra.records.data_path import TargetRecord
from infra.refusal import Refusal
from models.config.benchmark import BenchmarkConfig
from models.config.data import NO_TEMPLATE, OWN_TEMPLATE, DataConfig, RegenerationConfig, TemplateArgument
from models.config.recipe import RunConfig
from models.data.chat_template import open_chat_template
from models.data.conversations import Document, Message, read_documents, read_records, source_hash
from models.data.dialogue import Prompter
from models.data.media import Prompt
from models.data.reading import converted, whole
from models.data.sample_set import SampleSet
from models.data.samples import SampleEncoder
from models.data.tokenizer import read_tokenizer

AUTO = "auto"
"""A chat template for conversations if the tokenizer has one, none for text."""
LEAST_TOKENS = 2
SAMPLES_PER_PROMPT = 4
"""Samples read per prompt: some give none, or one that was seen before."""
_MULTI_TURN = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


@dataclass(frozen=True)
class SuiteFormat:
    """Fields of a suite's records that hold question and category."""

    title: str
    address: str
    """Address of the suite, as in `data.source`."""
    question_fields: tuple[str, ...]
    """The first of these fields that a record has is its question: a text, or turns of which the first is asked."""
    category: str | None = None
    """The field of the category; None without categories."""
    grouped: Mapping[str, str] = field(default_factory=dict)
    """Categories that the suite's publication reports as one."""


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
OWN_SUITE = SuiteFormat("a suite of questions", "", ("turns", "question", "problem", "prompt"), "category")
"""A user's file, in which `category` is optional."""


@dataclass(frozen=True)
class Question:
    """The first question of a record."""

    place: str
    text: str
    category: str | None


@dataclass(frozen=True)
class SuitePrompts:
    """Token ids of a suite's prompts and their categories."""

    prompts: list[list[int]]
    categories: tuple[str, ...]
    """Category of each prompt; empty: no categories."""
    dataset_hash: str
    template_hash: str
    too_long: int = 0
    """Questions that were left out because of their length."""


def suite_address(source: str) -> str:
    """The address of a suite with a well-known name, otherwise the source itself."""
    return SUITES[source].address if source in SUITES else source


def find_suite_format(name: str, source: str) -> SuiteFormat | None:
    """The format of a well-known suite, or by the first record; None: conversations or text."""
    known = SUITES.get(source) or SUITES.get(name)
    if known is not None:
        return known
    _, record = next(iter(read_records(source)))
    record = whole(record)
    is_question = isinstance(record, dict) and any(record.get(key) for key in OWN_SUITE.question_fields)
    return OWN_SUITE if is_question else None


def read_questions(source: str, suite: SuiteFormat) -> Iterator[Question]:
    """Every question in order. Raises Refusal for an unreadable source, and with its line for an unusable record."""
    yield from converted(read_records(suite_address(source)), lambda place, record: _question(place, record, suite))


def _question(place: str, record: Any, suite: SuiteFormat) -> Question:
    if not isinstance(record, dict):
        kind = type(record).__name__
        raise Refusal(f"{place}: write a JSON object with {' or '.join(suite.question_fields)} in place of this {kind}")
    value = next((record[key] for key in suite.question_fields if record.get(key)), None)
    text = value[0] if isinstance(value, list) and value else value
    if not isinstance(text, str) or not text.strip():
        raise Refusal(
            f"{place}: no {' or '.join(suite.question_fields)} (a text, or turns) in this record of {suite.title}; its "
            f"keys are {sorted(record)}. Correct the record, or give a suite of conversations or text another name"
        )
    return Question(place, text, _category(place, record, suite))


def _category(place: str, record: Mapping[str, Any], suite: SuiteFormat) -> str | None:
    if suite.category is None or (suite is OWN_SUITE and record.get(suite.category) is None):
        return None
    category = record.get(suite.category)
    if not isinstance(category, str) or not category.strip():
        raise Refusal(
            f"{place}: {suite.category!r} has to be the category of this record of {suite.title}, and is "
            f"{category!r:.40}: correct the record, or fetch the suite from {suite.address or 'its source'}"
        )
    return suite.grouped.get(category, category)


def question_prompts(
    source: str,
    suite: SuiteFormat,
    target: Path,
    *,
    count: int,
    prompt_tokens: int,
    chat_template: str,
    template_arguments: Mapping[str, TemplateArgument] | None = None,
    add_bos: bool,
) -> SuitePrompts:
    """At most `count` different prompts, spread evenly over the categories.

    With a chat template a prompt is a rendered question, without one its text. Prompts of more than `prompt_tokens`
    tokens are left out, because a truncated question is another question.

    Raises Refusal: an unreadable source, no chat template, or fewer than two prompts.
    """
    tokenizer: PreTrainedTokenizerBase = read_tokenizer(target)
    template = open_chat_template(tokenizer, chat_template, template_arguments)
    # One token more than is kept shows which plain texts are too long.
    settings = RegenerationConfig(prompt_tokens=prompt_tokens + 1)
    prompter = Prompter(tokenizer, template, settings, add_bos=add_bos)
    questions = list(read_questions(source, suite))
    prompts: dict[tuple[int, ...], Question] = {}
    too_long = 0
    for question in _round_robin(questions):
        message = Message("text" if template is None else "user", question.text)
        prompt = prompter.prompt(Document(question.place, (message,), plain=template is None)).tokens
        if len(prompt) > prompt_tokens:
            too_long += 1
        elif len(prompt) > 1:
            prompts.setdefault(prompt, question)
        if len(prompts) == count:
            break
    if len(prompts) < 2:
        raise Refusal(
            f"{len(prompts)} of {len(questions)} questions give a prompt of 2 to {prompt_tokens} tokens: raise the "
            "longest prompt, or give another suite"
        )
    categories = tuple(question.category or "" for question in prompts.values())
    content, rendered_by = source_hash(suite_address(source)), NO_TEMPLATE if template is None else template.hash
    # The only category of a suite would repeat the suite's own figure.
    several = len(set(categories)) > 1
    return SuitePrompts(list(map(list, prompts)), categories if several else (), content, rendered_by, too_long)


def _round_robin(questions: Iterable[Question]) -> Iterator[Question]:
    """One of each category, then the next of each."""
    by_category: dict[str | None, list[Question]] = {}
    for question in questions:
        by_category.setdefault(question.category, []).append(question)
    for row in zip_longest(*by_category.values()):
        yield from (question for question in row if question is not None)


def heldout_prompts(samples: SampleSet, config: BenchmarkConfig) -> list[list[int]]:
    """Prompts from a run's held-out samples, of text alone. Raises Refusal if there are too few."""
    heldout = (samples[index] for index in range(len(samples)))
    texts = ((sample.tokens, sample.loss_mask) for sample in heldout if not sample.images)
    remedy = "hold more of the text out (data.heldout_share), raise benchmark.prompt_tokens, or give more text"
    return take_prompts(texts, config.prompts, config.prompt_tokens, remedy)


def seen_prompts(samples: SampleSet, most: int, longest: int) -> list[Prompt]:
    """The first `most` held-out prompts with one image: everything before the first answer, where it leaves room for
    one within `longest` tokens."""
    prompts = dict[Prompt, None]()
    for sample in (samples[index] for index in samples.image_offsets.diff().nonzero().flatten().tolist()):
        first = int(sample.loss_mask.int().argmax())
        # Images of later turns stand after the first answer.
        if len(prompts) < most and first + 2 <= longest and len(sample.images) == 1:
            prompts[Prompt(tuple(sample.tokens[:first].tolist()), sample.images)] = None
    return list(prompts)


def suite_prompts(config: RunConfig, target: TargetRecord, name: str) -> SuitePrompts:
    """The prompts of one of `promotion.suites`. Raises Refusal if there are too few."""
    promotion, data, add_bos = config.promotion, config.data, config.target.add_bos
    source = promotion.suites[name]
    try:
        suite = find_suite_format(name, source)
        if suite is None:
            own = data.chat_template in (NO_TEMPLATE, OWN_TEMPLATE) or next(read_documents(source)).plain
            template = AUTO if own else data.chat_template
            prompts, rendered_by = read_prompts(
                source, target, config.benchmark, template, add_bos, data.template_arguments
            )
            return SuitePrompts(prompts, (), source_hash(source), rendered_by)
        return question_prompts(
            source,
            suite,
            Path(target.path),
            count=promotion.suite_prompts,
            prompt_tokens=promotion.suite_prompt_tokens,
            chat_template=data.chat_template,
            template_arguments=data.template_arguments,
            add_bos=add_bos,
        )
    except Refusal as error:
        raise Refusal(f"promotion.suites.{name}: {error}") from error


def choose_template(tokenizer: PreTrainedTokenizerBase, name: str, *, plain: bool) -> str:
    """The value of `data.chat_template` that `auto` stands for; any other name is its own."""
    if name != AUTO:
        return name
    return NO_TEMPLATE if plain or not tokenizer.chat_template else OWN_TEMPLATE


def read_prompts(
    source: str,
    target: TargetRecord,
    config: BenchmarkConfig,
    chat_template: str,
    add_bos: bool,
    template_arguments: Mapping[str, TemplateArgument] | None = None,
) -> tuple[list[list[int]], str]:
    """Prompts from a file, and the hash of the chat template (`none` for plain text)."""
    tokenizer: PreTrainedTokenizerBase = read_tokenizer(target.path)
    name = choose_template(tokenizer, chat_template, plain=next(read_documents(source)).plain)
    data = DataConfig(
        source=source,
        chat_template=name,
        template_arguments=dict(template_arguments or {}) if name != NO_TEMPLATE else {},
        max_tokens=max(1024, 4 * config.prompt_tokens),
    )
    encoder = SampleEncoder(
        tokenizer,
        data,
        add_bos,
        vocabulary=target.vocab_size,
        ends=frozenset(target.eos_ids),
        media_ids=target.media_ids,
    )
    samples = islice(encoder.encode(read_documents(source)), SAMPLES_PER_PROMPT * config.prompts)
    prompts = take_prompts(
        ((torch.from_numpy(s.tokens).long(), torch.from_numpy(s.loss_mask)) for s in samples),
        config.prompts,
        config.prompt_tokens,
        f"add prompts to {source}, or admit longer ones (benchmark.prompt_tokens, --prompt-tokens)",
    )
    return prompts, NO_TEMPLATE if encoder.template is None else encoder.template.hash


def take_prompts(
    samples: Iterable[tuple[Tensor, Tensor]], count: int, prompt_tokens: int, remedy: str
) -> list[list[int]]:
    """The first `count` different prompts.

    A conversation's prompt is everything before its first supervised token; it is left out if longer than
    `prompt_tokens`, because a truncated turn would not be a prompt of that template. Plain text, supervised from its
    start, gives its first `prompt_tokens` tokens, at most half of it.

    Args:
        samples: tokens `[T]` int64 and loss mask `[T]` bool of each sample.
        count: most prompts.
        prompt_tokens: most tokens of a prompt.
        remedy: what to do where they are too few, for the refusal.

    Raises Refusal: fewer than two prompts.
    """
    prompts: dict[tuple[int, ...], None] = {}
    seen = 0
    for tokens, loss_mask in samples:
        seen += 1
        prompt = _prompt(tokens, loss_mask, prompt_tokens)
        if prompt is not None:
            prompts[tuple(prompt)] = None
        if len(prompts) == count:
            break
    if len(prompts) < 2:
        raise Refusal(
            f"{len(prompts)} of {seen} samples give a prompt of {LEAST_TOKENS} to {prompt_tokens} tokens, and at least "
            f"two are needed: {remedy}"
        )
    return [list(prompt) for prompt in prompts]


def _prompt(tokens: Tensor, loss_mask: Tensor, prompt_tokens: int) -> list[int] | None:
    first = int(loss_mask.int().argmax())
    # Position 0 is never generated: in plain text with a beginning-of-text token supervision starts at 1.
    length = min(prompt_tokens, len(tokens) // 2) if first <= 1 else first
    return tokens[:length].tolist() if LEAST_TOKENS <= length <= prompt_tokens else None
