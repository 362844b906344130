"""Speculative decoding against the target alone over many tokens; writes benchmarks/results/lossless-<target>.json.

    python benchmarks/lossless.py --target T [--draft D ...] --prompts FILE [--tokens 200000] [--lookaheads 4]
        [--trees dynamic-4-4-12] [--batches 1,4,16] [--scheduled]

Every source (drafts and baselines) decodes the same conversations in every setting: chains of each lookahead at each
batch size, and trees at each batch size where the source branches. With `--scheduled`, drafts with confidences decode
with scheduled verification as well, by step costs that make it verify few proposals or many. Each text is compared with
a plain greedy one: the first `--plain-tokens` tokens with plain decoding at batch 1, the rest with plain decoding of
many prompts at once (no padding: every row has its own positions). After a divergence the comparison goes on from the
speculative prefix.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scheduled_verification import Scheduled
from sources import Ground, add_arguments, load, numbers

from infra.files.atomic import write_atomically
from infra.processes.exit import run_main
from infra.provenance import git_sha
from infra.records.acceptance import Conditions, LosslessRecord
from infra.records.data_path import Record
from infra.records.goodput import CostFit
from models.benchmark.contestants import SelectedLayers, draft_of
from models.decoding.acceptance import acceptance_length, distinct_token_share
from models.decoding.continuations import continue_batch
from models.decoding.goodput import FittedCosts
from models.decoding.lossless import LosslessCheck, total
from models.decoding.plain import continue_greedily
from models.decoding.speculative import Shape, speculate_together
from models.drafts.base import Draft
from models.drafts.batched_proposer import ProposalSource
from models.drafts.trees import parse_shape

RESULTS = Path(__file__).parent / "results"
PLAIN_BATCH = 16
COSTS = {f"{cost:g} of a step per token": CostFit(
    constant=1.0, per_text=0.0, per_token=cost, knee=0.0, per_token_beyond=0.0, several=0.0, several_per_text=0.0,
    together=0.0, per_position=0.0,
) for cost in (0.02, 0.2)}  # fmt: skip
"""Of scheduled verification."""


class LosslessCell(Record):
    """One source in one setting."""

    source: str
    lookahead: str
    """Of a chain, or the tree as it was given."""
    batch: int
    """Texts that one target forward verifies."""
    lossless: LosslessRecord
    acceptance_length: float
    wall_s: float


class LosslessResult(Record):
    """What is committed."""

    commit: str
    date: str
    conditions: Conditions
    tokens: int
    mismatches: int
    ties: int
    conversations: int
    """Decoded in every cell."""
    compared_at_batch_one: int
    """Tokens of each cell that were compared with plain decoding at batch 1; the rest with batched decoding."""
    distinct_token_share: float
    cells: tuple[LosslessCell, ...]
    wall_s: float


@dataclass(frozen=True)
class Setting:
    """One cell before it is decoded."""

    name: str
    source: ProposalSource
    lookahead: str
    shape: Shape
    batch: int


def settings(options: argparse.Namespace, ground: Ground) -> list[Setting]:
    """Every source with every lookahead, tree and batch size."""
    shapes: list[tuple[str, Shape]] = [(str(at), at) for at in numbers(options.lookaheads, "--lookaheads", 0)]
    shapes += [(text, parse_shape(text)) for text in options.trees.split(",") if text]
    return [
        Setting(name, source, text, shape, batch)
        for name, source in ground.sources.items()
        for text, shape in shapes
        for batch in numbers(options.batches, "--batches", 1)
        if isinstance(shape, int) or source.proposers(1).branches
    ]


def scheduled(ground: Ground) -> dict[str, ProposalSource]:
    """Drafts with confidences, verified as far as it pays."""
    found: dict[str, ProposalSource] = {}
    for name, source in ground.sources.items():
        if isinstance(source, Draft | SelectedLayers) and (settings := draft_of(source).config).confident:
            ones = [1.0] * settings.lookaheads(64)[-1]
            for cost, fit in COSTS.items():
                found[f"{name}, scheduled by {cost}"] = Scheduled(source, FittedCosts(fit, fit), ones)
    return found


def check(options: argparse.Namespace) -> LosslessResult:
    """Decode and compare; raises ValueError where the prompts do not give enough tokens."""
    begun, commit = time.perf_counter(), git_sha()
    # As many cells as there may be, so that prompts are read once; how many there are is known with the sources.
    ground = load(options, -(-2 * options.tokens // options.max_new_tokens), options.report_lookahead)
    if options.scheduled:
        ground.sources.update(scheduled(ground))
    cells = settings(options, ground)
    texts, at_batch_one = plain_texts(options, ground, -(-options.tokens // len(cells)))
    used = ground.prompts[: len(texts)]
    found = []
    for cell in cells:
        found.append(decode(options, ground, cell, used, texts))
        row = found[-1].lossless
        print(
            f"{cell.name}, {cell.lookahead} at batch {cell.batch}: {row.tokens} tokens, {row.mismatches} mismatches, "
            f"{row.ties} ties, acceptance length {found[-1].acceptance_length:.2f}, {found[-1].wall_s:.0f} s",
            flush=True,
        )
    return LosslessResult(
        commit=commit,
        date=time.strftime("%Y-%m-%d"),
        conditions=ground.conditions.model_copy(update={"prompts": len(texts)}),
        tokens=sum(cell.lossless.tokens for cell in found),
        mismatches=sum(cell.lossless.mismatches for cell in found),
        ties=sum(cell.lossless.ties for cell in found),
        conversations=len(texts),
        compared_at_batch_one=at_batch_one,
        distinct_token_share=distinct_token_share(texts),
        cells=tuple(found),
        wall_s=time.perf_counter() - begun,
    )


def plain_texts(options: argparse.Namespace, ground: Ground, tokens: int) -> tuple[list[list[int]], int]:
    """The target's own texts, `tokens` at least, and how many of the tokens were decoded at batch 1."""
    target, ends, prompts = ground.loaded.target, ground.loaded.eos_ids, ground.prompts
    texts: list[list[int]] = []
    while len(texts) < len(prompts) and (done := sum(map(len, texts))) < min(options.plain_tokens, tokens):
        texts.append(continue_greedily(target, prompts[len(texts)], options.max_new_tokens, ends))
        print(f"plain: {done} tokens", flush=True)
    at_batch_one = sum(map(len, texts))
    while len(texts) < len(prompts) and (done := sum(map(len, texts))) < tokens:
        batch = prompts[len(texts) : len(texts) + PLAIN_BATCH]
        texts += continue_batch(target, batch, options.max_new_tokens, ends)
        print(f"plain: {done} tokens", flush=True)
    if sum(map(len, texts)) < tokens:
        raise ValueError(
            f"{len(prompts)} prompts give {sum(map(len, texts))} tokens, {tokens} are wanted in each setting: give "
            "more text, a larger --max-new-tokens, or more settings"
        )
    return texts, at_batch_one


def decode(
    options: argparse.Namespace,
    ground: Ground,
    cell: Setting,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
) -> LosslessCell:
    """All conversations in one setting."""
    begun, loaded = time.perf_counter(), ground.loaded
    checker = LosslessCheck(loaded.target, loaded.exact, options.max_new_tokens, loaded.eos_ids)
    decoded, compared = [], []
    for first in range(0, len(prompts), cell.batch):
        batch = prompts[first : first + cell.batch]
        found = speculate_together(
            loaded.target, cell.source, batch, cell.shape, options.max_new_tokens, loaded.eos_ids
        )
        decoded += found
        for prompt, result, own in zip(batch, found, texts[first : first + cell.batch], strict=True):
            compared.append(checker.compare(prompt, result.tokens, own))
    return LosslessCell(
        source=cell.name,
        lookahead=cell.lookahead,
        batch=cell.batch,
        lossless=total(compared),
        acceptance_length=acceptance_length([result.counts for result in decoded]),
        wall_s=time.perf_counter() - begun,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--tokens", type=int, default=200_000, help="of all settings together")
    parser.add_argument("--plain-tokens", type=int, default=1_000)
    parser.add_argument("--lookaheads", default="4", help="with commas; 0 proposes nothing")
    parser.add_argument("--trees", default="dynamic-4-4-12", help="with commas; empty for none")
    parser.add_argument("--batches", default="1,4,16")
    parser.add_argument("--scheduled", action="store_true", help="with scheduled verification as well")
    options = parser.parse_args()
    options.report_lookahead = max([1, *numbers(options.lookaheads, "--lookaheads", 0)])
    result = check(options)
    path = options.out or RESULTS / f"lossless-{Path(options.target).name}.json"
    write_atomically(path, result)
    print(
        f"{result.tokens} tokens, {result.mismatches} mismatches, {result.ties} ties in {result.wall_s:.0f} s: {path}"
    )
    if result.mismatches:
        raise SystemExit(1)


if __name__ == "__main__":
    run_main(main)
