"""Benchmark prompts from held-out samples, files and suites."""

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from infra.records.data_path import TargetRecord
from infra.refusal import Refusal
from models.config.benchmark import BenchmarkConfig
from models.config.data import DataConfig
from models.config.recipe import RunConfig
from models.data.conversations import read_documents, source_hash
from models.data.sample_set import SampleSet
from models.data.samples import SampleEncoder, template_hash
from models.data.suites import SuitePrompts, find_suite_format, question_prompts

Template = Literal["auto", "tokenizer", "none"]
LEAST_TOKENS = 2
SAMPLES_PER_PROMPT = 4
"""Samples read per prompt: some give none, or one that was seen before."""


def heldout_prompts(samples: SampleSet, config: BenchmarkConfig) -> list[list[int]]:
    """Prompts from a run's held-out samples. Raises Refusal if there are too few."""
    heldout = (samples[index] for index in range(len(samples)))
    return take_prompts(((sample.tokens, sample.loss_mask) for sample in heldout), config.prompts, config.prompt_tokens)


def suite_prompts(config: RunConfig, target: TargetRecord, name: str) -> SuitePrompts:
    """The prompts of one of `promotion.suites`. Raises Refusal if there are too few."""
    promotion, add_bos = config.promotion, config.target.add_bos
    source = promotion.suites[name]
    try:
        suite = find_suite_format(name, source)
        if suite is None:
            prompts, template = read_prompts(source, target, config.benchmark, "auto", add_bos)
            return SuitePrompts(prompts, (), source_hash(source), template)
        return question_prompts(
            source,
            suite,
            Path(target.path),
            count=promotion.suite_prompts,
            prompt_tokens=promotion.suite_prompt_tokens,
            templated=config.data.chat_template == "tokenizer",
            add_bos=add_bos,
        )
    except Refusal as error:
        raise Refusal(f"promotion.suites.{name}: {error}") from error


def read_prompts(
    source: str, target: TargetRecord, config: BenchmarkConfig, template: Template, bos: bool
) -> tuple[list[list[int]], str]:
    """Prompts from a file, and the hash of the chat template (`none` for plain text)."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(target.path)
    if template == "auto":
        plain = next(read_documents(source)).plain
        template = "none" if plain or not tokenizer.chat_template else "tokenizer"
    data = DataConfig(source=source, chat_template=template, max_tokens=max(1024, 4 * config.prompt_tokens))
    encoder = SampleEncoder(tokenizer, data, bos)
    samples = islice(encoder.encode(read_documents(source)), SAMPLES_PER_PROMPT * config.prompts)
    prompts = take_prompts(
        ((torch.from_numpy(s.tokens).long(), torch.from_numpy(s.loss_mask)) for s in samples),
        config.prompts,
        config.prompt_tokens,
    )
    return prompts, "none" if template == "none" else template_hash(tokenizer)


def take_prompts(samples: Iterable[tuple[Tensor, Tensor]], count: int, prompt_tokens: int) -> list[list[int]]:
    """The first `count` different prompts.

    A conversation's prompt is everything before its first supervised token; it is left out if longer than
    `prompt_tokens`, because a truncated turn would not be a prompt of that template. Plain text, supervised from its
    start, gives its first `prompt_tokens` tokens, at most half of it.

    Args:
        samples: tokens `[T]` int64 and loss mask `[T]` bool of each sample.
        count: most prompts.
        prompt_tokens: most tokens of a prompt.

    Raises:
        Refusal: fewer than two prompts.
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
            f"{len(prompts)} of {seen} samples give a prompt of {LEAST_TOKENS} to {prompt_tokens} tokens: raise "
            "benchmark.prompt_tokens, or give more text"
        )
    return [list(prompt) for prompt in prompts]


def _prompt(tokens: Tensor, loss_mask: Tensor, prompt_tokens: int) -> list[int] | None:
    first = int(loss_mask.int().argmax())
    # Position 0 is never generated: in plain text with a beginning-of-text token supervision starts at 1.
    length = min(prompt_tokens, len(tokens) // 2) if first <= 1 else first
    return tokens[:length].tolist() if LEAST_TOKENS <= length <= prompt_tokens else None
