"""Target, sources of proposals and prompts, for benchmarks that decode for themselves."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.records.acceptance import Conditions
from infra.records.data_path import TargetRecord
from models.benchmark.conditions import Counter, conditions
from models.benchmark.contestants import Contestants, draft_of, load_contestants
from models.benchmark.standalone import baselines, find_target
from models.config.benchmark import BenchmarkConfig
from models.data.conversations import source_hash
from models.data.prompts import SUITES, SuitePrompts, question_prompts, read_prompts
from models.drafts.batched_proposer import ProposalSource
from models.dtypes import DTYPES

QUESTION_TOKENS = 256
"""Longer questions are left out."""


@dataclass(frozen=True)
class Ground:
    """All that is decoded with, and what."""

    loaded: Contestants
    sources: dict[str, ProposalSource]
    """By the name that is written down."""
    prompts: list[list[int]]
    conditions: Conditions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that say what is decoded with."""
    parser.add_argument("--target", required=True, help="local folder, Hub id, or GGUF package")
    parser.add_argument("--draft", type=Path, action="append", default=[], help="exported draft; may be repeated")
    parser.add_argument(
        "--baselines", default="prompt-lookup,token-recycling,suffix", help="with commas; empty for none"
    )
    parser.add_argument("--prompts", required=True, help=".jsonl, .txt, or python-docs")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--chat-template", choices=["auto", "tokenizer", "none"], default="auto")
    parser.add_argument("--add-bos", action="store_true", help="as in the recipe's target.add_bos")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--out", type=Path, help="default: a file of this benchmark's name in benchmarks/results/")


def add_question_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that name files of questions."""
    parser.add_argument("--gsm8k", default=os.environ.get("DRAFTSMITH_GSM8K"))
    parser.add_argument("--spec-bench", default=os.environ.get("DRAFTSMITH_SPEC_BENCH"))


def question_sets(options: argparse.Namespace, target: TargetRecord, add_bos: bool) -> dict[str, SuitePrompts]:
    """`options.prompts` questions of each file, in its order, spread evenly over categories, as plain text."""
    files = {"gsm8k": options.gsm8k, "spec-bench": options.spec_bench}
    return {
        name: question_prompts(
            file, SUITES[name], Path(target.path), count=options.prompts, prompt_tokens=QUESTION_TOKENS,
            chat_template="none", add_bos=add_bos,
        )
        for name, file in files.items()
        if file
    }  # fmt: skip


def load(options: argparse.Namespace, prompts: int, lookahead: int) -> Ground:
    """Load what the options name; raises ValueError for a baseline that there is not."""
    config = BenchmarkConfig(
        prompts=prompts,
        prompt_tokens=options.prompt_tokens,
        max_new_tokens=options.max_new_tokens,
        lookahead=lookahead,
    )
    target = find_target(options.target, (0,))
    texts, template_hash = read_prompts(str(options.prompts), target, config, options.chat_template, options.add_bos)
    loaded = load_contestants(Path(target.path), options.draft, DTYPES[options.dtype])
    under = conditions(
        config,
        Counter.reference(loaded.target),
        target=target,
        draft=options.draft[0] if options.draft else None,
        dataset_hash=source_hash(str(options.prompts)),
        template_hash=template_hash,
        prompts=len(texts),
    )
    return Ground(loaded, _named(loaded, options.draft, options.baselines), texts, under)


def _named(loaded: Contestants, folders: Sequence[Path], names: str) -> dict[str, ProposalSource]:
    named: dict[str, ProposalSource] = {}
    for folder, source in zip(folders, loaded.drafts, strict=True):
        named[f"{draft_of(source).config.method} {'/'.join(folder.absolute().parts[-2:])}"] = source
    named |= baselines([name for name in names.split(",") if name])
    if not named:
        raise ValueError("nothing proposes: give --draft, or --baselines")
    return named


def numbers(text: str, option: str, least: int) -> list[int]:
    """`1,4,16`; raises ValueError for anything else, or a smaller number."""
    try:
        found = [int(part) for part in text.split(",") if part]
    except ValueError:
        found = [least - 1]
    if any(number < least for number in found):
        raise ValueError(f"{option} {text!r}: give numbers from {least} on with commas, for instance 1,4,16")
    return list(dict.fromkeys(found))
