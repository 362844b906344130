"""Counts of a real draft over texts that its target sampled again and again for the same prompts, for gates.py.

    python benchmarks/gate_records.py RUN OTHER [--texts 8]

RUN and OTHER are finished runs of the same recipe with another seed. Every prompt of RUN's benchmark is continued once
greedily and `--texts` times by sampling, each time with a seed of its own; RUN's draft walks over each text as in the
benchmark, OTHER's over the greedy ones. Kept are tokens and complete steps of each, which is all that the gate reads.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from gates import RECORDS, GateRecords, Row

from infra.files.atomic import sha256_file, write_atomically
from infra.files.run_folder import RunFolder
from infra.processes.exit import run_main
from models.benchmark.conditions import Counter, conditions, sampled_law
from models.benchmark.contestants import Contestants, load_contestants
from models.data.prompts import heldout_prompts
from models.decoding.continuations import continue_batch
from models.decoding.simulated import features, simulate
from models.drafts.batched_proposer import RolloutSource
from models.drafts.sampling import GREEDY, Sampling
from models.dtypes import DTYPES
from models.run import PreparedRun

SEED = 20261122
Texts = list[list[int]]


def sample(contestants: Contestants, run: PreparedRun, prompts: Texts, sampling: Sampling, seed: int) -> Texts:
    """A text of this seed for every prompt."""
    config, target = run.config.benchmark, contestants.target
    return continue_batch(
        target,
        prompts,
        config.max_new_tokens,
        contestants.eos_ids,
        replace(sampling, generator=torch.Generator(target.device).manual_seed(seed)),
        batch_size=config.batch_size,
    )


def walk(contestants: Contestants, source: RolloutSource, prompts: Texts, texts: Texts, lookahead: int) -> list[Row]:
    """(tokens, complete steps) of every text."""
    rows = []
    for prompt, text in zip(prompts, texts, strict=True):
        aux = features(contestants.target, [*prompt, *text])
        counts = simulate(source, prompt, text, aux, lookahead, eos_ids=contestants.eos_ids)[-1]
        rows.append((counts.tokens, counts.steps))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("other", type=Path)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--json", type=Path, default=RECORDS)
    options = parser.parse_args()
    run = PreparedRun.open(options.run)
    config, prompts = run.config.benchmark, heldout_prompts(run.open_samples("heldout"), run.config.benchmark)
    draft, other = run.folder.export, RunFolder(options.other).export
    contestants = load_contestants(Path(run.target.path), [draft, other], DTYPES[run.config.benchmark_dtype])
    assert contestants.champion
    under = conditions(
        config,
        Counter.reference(contestants.target),
        target=run.target,
        draft=draft,
        dataset_hash=run.samples.dataset_hash,
        template_hash=run.samples.template_hash,
        prompts=len(prompts),
    )
    texts = sample(contestants, run, prompts, GREEDY, SEED)
    mine, theirs = (
        walk(contestants, source, prompts, texts, config.lookahead)
        for source in (contestants.draft, contestants.champion)
    )
    sampled = []
    for seed in range(SEED, SEED + options.texts):
        texts = sample(contestants, run, prompts, sampled_law(config, contestants.recommended), seed)
        sampled.append(tuple(walk(contestants, contestants.draft, prompts, texts, config.lookahead)))
        print(f"{len(sampled)} of {options.texts} texts of {len(prompts)} prompts", flush=True)
    records = GateRecords(
        conditions=under,
        other_draft_revision=sha256_file(other / "model.safetensors"),
        seed=SEED,
        greedy=tuple(mine),
        other_greedy=tuple(theirs),
        sampled=tuple(sampled),
    )
    write_atomically(options.json, records.model_dump_json() + "\n")


if __name__ == "__main__":
    run_main(main)
