"""Acceptance of an MTP layer before and after training on further text: our objective, and FastMTP's at equal tokens.

    python benchmarks/mtp.py [--seeds 3] [--samples 1200] [--pretraining 400] [--objectives NAME ...]

The target is the tiny one in MiMo's layout (benchmarks/mimo.py), in float32. Its MTP layer begins with random weights
and is first trained as its makers would: one step, cross-entropy of the text's own tokens. That is `before`. Each
objective then trains the same layer on the same further samples, in the same order and by the same optimizer, with
three steps of the layer. `chains_of_own_tokens` has the attention of ours and the loss of FastMTP's. Acceptance is the
simulated walk over the target's own greedy text of held-out prompts, at lookahead 4.
"""

import argparse
import copy
import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from mimo import write_mimo
from torch.optim.lr_scheduler import LambdaLR

from infra.files.atomic import write_atomically
from infra.files.run_folder import RunFolder
from infra.processes.exit import run_main
from infra.provenance import git_sha, hardware, versions
from models.config.mtp import MtpConfig
from models.config.recipe import load_recipe
from models.config.target import TargetConfig
from models.data.prepare import prepare_samples
from models.data.prompts import heldout_prompts
from models.data.sample_set import Sample
from models.decoding.acceptance import summarise
from models.decoding.continuations import continue_batch
from models.decoding.simulated import features, simulate
from models.drafts.base import PackedSamples, TargetProjection
from models.drafts.mtp.module import MtpDraft
from models.run import PreparedRun
from models.targets.model import TargetModel, eos_ids
from models.targets.prepare import prepare_target
from models.targets.tiny import one_thread
from models.targets.weights import TargetHead, read_target_head
from models.training.start import first_draft

ROOT = Path(__file__).parents[1]
RECIPE, RESULTS = ROOT / "recipes" / "tiny.yaml", ROOT / "benchmarks" / "results"
LOOKAHEAD, BATCH, WARMUP, CHUNK = 4, 2, 30, 256
RATES = {"pretraining": 5e-3, "training": 2e-3}
OBJECTIVES = ("training_time_test", "fastmtp", "chains_of_own_tokens")


class ChainsOfOwnTokens(MtpDraft):
    """Chains, with the other objective's loss: which part of the difference is whose."""

    @property
    def learns_own_tokens(self) -> bool:
        return True


def open_run(folder: Path, target: Path, samples: int, seed: int) -> PreparedRun:
    """A run of the tiny recipe with this target."""
    overrides = [f"target.name={target}", "target.source=huggingface", "target.aux_layer_ids=[]", f"seed={seed}"]
    config = load_recipe(RECIPE, [*overrides, 'draft={"method":"mtp"}', f"data.max_samples={samples}"])
    run, record = RunFolder(folder), prepare_target(TargetConfig(name=str(target), aux_layer_ids=()))
    write_atomically(run.config, config)
    write_atomically(run.target, record)
    write_atomically(run.samples, prepare_samples(config.data, record, False))
    return PreparedRun.open(run.path)


def train(draft: MtpDraft, target: TargetModel, samples: Sequence[Sample], rate: float) -> int:
    """One pass over the samples; the tokens that were trained on."""
    projection = TargetProjection(target.head.head, None, 1.0, None)
    optimizer, steps = torch.optim.AdamW(draft.parameters(), rate), len(samples) // BATCH
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP, (steps - step) / (0.6 * steps)))
    tokens = 0
    for first in range(0, steps * BATCH, BATCH):
        batch = packed(target, samples[first : first + BATCH])
        total = max(1, int(batch.loss_mask.sum()))
        optimizer.zero_grad()
        draft.loss(batch, projection, total, CHUNK).loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        tokens += len(batch.tokens)
    return tokens


def packed(target: TargetModel, samples: Sequence[Sample]) -> PackedSamples:
    """Samples with the target's states."""
    last = torch.cat([target.forward(sample.tokens[None].long()).last[0] for sample in samples])
    tokens, mask = (torch.cat([getattr(s, name) for s in samples]) for name in ("tokens", "loss_mask"))
    return PackedSamples(tokens.long(), mask.bool(), last, last, tuple(len(sample.tokens) for sample in samples))


def measured(
    draft: MtpDraft, target: TargetModel, texts: Sequence[tuple[list[int], list[int]]], ends: frozenset[int]
) -> dict[str, object]:
    """Acceptance over texts."""
    walks = [simulate(draft, p, t, features(target, [*p, *t]), LOOKAHEAD, eos_ids=ends)[-1:] for p, t in texts]
    found = summarise(walks)
    rates = [None if rate is None else round(rate, 3) for rate in found.by_position]
    return {"length": round(found.length[LOOKAHEAD], 3), "by_position": rates, "steps": found.steps[LOOKAHEAD]}


def one_seed(seed: int, options: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Before, and after each objective."""
    tiny = prepare_target(load_recipe(RECIPE).target)
    place = write_mimo(Path(tiny.path), folder / "mimo", seed)
    run = open_run(folder / "run", place, options.samples + options.pretraining, seed)
    target, head = TargetModel.load(place, (), torch.float32), read_target_head(place, torch.float32)
    prompts = heldout_prompts(run.open_samples("heldout"), run.config.benchmark)
    ends = eos_ids(place)
    texts = continue_batch(target, prompts, run.config.benchmark.max_new_tokens, ends)
    pairs = [(list(prompt), list(text)) for prompt, text in zip(prompts, texts, strict=True)]
    samples, order = run.open_samples(), torch.Generator().manual_seed(seed)
    chosen = [samples[int(index)] for index in torch.randperm(run.samples.train_samples, generator=order)]
    shipped = fresh(run, head, {"objective": "fastmtp", "ttt_steps": 1})
    found: dict[str, object] = {"seed": seed, "untrained": measured(shipped, target, pairs, ends)}
    train(shipped, target, chosen[: options.pretraining], RATES["pretraining"])
    found["before"] = measured(shipped, target, pairs, ends)
    for objective in options.objectives:
        draft, own = copy.deepcopy(shipped), objective == "chains_of_own_tokens"
        draft.__class__ = ChainsOfOwnTokens if own else MtpDraft
        named = {"objective": "training_time_test" if own else objective, "ttt_steps": options.steps}
        draft.config = draft.config.model_copy(update=named)
        begun = time.process_time()
        tokens = train(draft, target, chosen[options.pretraining :], RATES["training"])
        cpu_s = round(time.process_time() - begun, 1)
        found[objective] = measured(draft, target, pairs, ends) | {"tokens": tokens, "cpu_s": cpu_s}
    return found


def fresh(run: PreparedRun, head: TargetHead, changes: dict[str, object]) -> MtpDraft:
    """The target's own layer."""
    draft, _ = first_draft(run, head)
    assert isinstance(draft, MtpDraft)
    draft.config = MtpConfig.model_validate(draft.config.model_dump() | changes)
    return draft


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=1200)
    parser.add_argument("--pretraining", type=int, default=400)
    parser.add_argument("--steps", type=int, default=3, help="of the layer, in training")
    parser.add_argument("--objectives", nargs="+", default=OBJECTIVES, choices=OBJECTIVES)
    parser.add_argument("--out", type=Path, default=RESULTS / "mtp.json")
    options = parser.parse_args()
    seeds: list[dict[str, Any]] = []
    with one_thread():
        for seed in range(options.seeds):
            with TemporaryDirectory() as folder:
                seeds.append(one_seed(seed, options, Path(folder)))
            print(json.dumps(seeds[-1]), flush=True)
    stages = ["before", *options.objectives]
    result = {
        "commit": git_sha(),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": hardware(),
        "versions": versions(),
        "target": "tiny-llama in MiMo's layout, float32",
        "samples": options.samples,
        "pretraining_samples": options.pretraining,
        "steps_in_training": options.steps,
        "learning_rates": RATES,
        "lookahead": LOOKAHEAD,
        "mean_length": {stage: round(mean(one[stage]["length"] for one in seeds), 3) for stage in stages},
        "mean_by_position": {
            stage: [round(mean(rates), 3) for rates in zip(*(one[stage]["by_position"] for one in seeds), strict=True)]
            for stage in stages
        },
        "seeds": seeds,
    }
    write_atomically(options.out, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    run_main(main)
