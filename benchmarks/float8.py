"""Drafts trained on hidden states in float8 against bfloat16: acceptance, the target's own tokens, and bytes.

    python benchmarks/float8.py [--recipe RECIPE] [--seeds 0 1] [--prompts 96] [--results FOLDER] [OVERRIDE ...]

Trains one draft per seed and data type; everything else is equal. All drafts walk over the same greedy texts of the
held-out prompts, and drafts of a seed are compared by a paired bootstrap over prompts. Before that: how often the head
gives the same token from states that were rounded to float8 as from those rounded to bfloat16. Writes
benchmarks/results/float8-RECIPE.json; a quarter of an hour for recipes/tiny.yaml on two cores.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prepared import prepared_run, trained_export

from infra.files.atomic import write_atomically
from infra.processes.exit import run_main
from infra.provenance import git_sha, hardware
from infra.records.data_path import TrainingResult
from models.benchmark.conditions import Counter, conditions
from models.benchmark.contestants import load_contestants
from models.benchmark.measure import at, walk_texts
from models.benchmark.paired import LEVEL, paired_difference
from models.config.recipe import RunConfig
from models.data.prompts import heldout_prompts
from models.decoding.acceptance import acceptance_length
from models.dtypes import DTYPES
from models.run import PreparedRun
from models.targets.layout import HiddenStateLayout
from models.targets.model import HiddenStates, TargetModel

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
BFLOAT16, FLOAT8 = "bfloat16", "float8"


@torch.no_grad()
def rounding(run: PreparedRun, target: TargetModel, samples: int = 24) -> dict[str, float]:
    """What float8 changes of the target's distribution, over some samples."""
    ids, kept = run.config.target.aux_layer_ids, run.open_samples()
    layout = HiddenStateLayout(len(ids), run.target.hidden_size, DTYPES[FLOAT8])
    same, distance, errors = list[float](), list[float](), list[float]()
    for index in range(samples):
        hidden = target.forward(kept[index].tokens[None])
        exact = HiddenStates(hidden.aux[0].bfloat16(), hidden.last[0].bfloat16())
        read = layout.restored(layout.stored(exact))
        before, after = (target.logits(one.last.to(target.head_weight)) for one in (exact, read))
        same.append((before.argmax(-1) == after.argmax(-1)).float().mean().item())
        distance.append((before.softmax(-1) - after.softmax(-1)).abs().sum(-1).mean().item() / 2)
        errors.append(((read.aux.float() - exact.aux.float()).norm() / exact.aux.float().norm()).item())
    mean = {"same_top_token": same, "total_variation": distance, "relative_error_of_features": errors}
    return {name: round(float(np.mean(values)), 5) for name, values in mean.items()}


def compare(run: PreparedRun, exports: dict[str, dict[int, Path]], prompts: int) -> dict[str, Any]:
    """All drafts on the same texts."""
    config: RunConfig = run.config
    settings = config.benchmark.model_copy(update={"prompts": prompts})
    asked = heldout_prompts(run.open_samples("heldout"), settings)
    named = {(kind, seed): folder for kind, folders in exports.items() for seed, folder in folders.items()}
    loaded = load_contestants(Path(run.target.path), list(named.values()), DTYPES[config.benchmark_dtype])
    sources = {f"{kind} {seed}": draft for (kind, seed), draft in zip(named, loaded.drafts, strict=True)}
    walked = walk_texts(loaded, settings, "greedy", asked, sources)
    counts = {name: at(walk, settings.lookahead) for name, walk in walked.walks.items()}
    lengths = {name: round(acceptance_length(side), 4) for name, side in counts.items()}
    differences = []
    for seed in exports[FLOAT8]:
        sides = [
            np.array([(float(c.tokens), float(c.steps)) for c in counts[f"{kind} {seed}"]])
            for kind in (FLOAT8, BFLOAT16)
        ]
        found = paired_difference(sides[0], sides[1])
        low, high = found.lower_bound, found.quantile(LEVEL)
        estimate = lengths[f"{FLOAT8} {seed}"] / lengths[f"{BFLOAT16} {seed}"] - 1
        differences.append({"seed": seed, "relative": round(estimate, 4), "interval": [round(low, 4), round(high, 4)]})
    under = conditions(
        settings, Counter.reference(loaded.target), target=run.target, draft=None,
        dataset_hash=run.samples.dataset_hash, template_hash=run.samples.template_hash, prompts=len(asked),
    )  # fmt: skip
    return {
        "acceptance_length": lengths,
        "float8_against_bfloat16": differences,
        "rounding": rounding(run, loaded.target),
        "conditions": under.model_dump(mode="json"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "tiny.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    begun, exports, trained = time.perf_counter(), dict[str, dict[int, Path]](), dict[str, float]()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for kind in (BFLOAT16, FLOAT8):
            exports[kind] = {}
            for seed in options.seeds:
                path = folder / f"{kind}-{seed}"
                overrides = [*options.overrides, f"generator.stored_dtype={kind}", f"seed={seed}"]
                exports[kind][seed] = trained_export(path, options.recipe, overrides)
                trained[f"{kind} {seed}"] = round(TrainingResult.read(path / "training.json").final_loss, 4)
                print(kind, seed, trained, flush=True)
        with prepared_run(folder / "shared", options.recipe, options.overrides) as run:
            found = compare(run, exports, options.prompts)
            size = {
                kind: HiddenStateLayout(
                    run.layout.aux_count, run.layout.hidden_size, DTYPES[kind], run.layout.top_token
                ).bytes_per_token
                for kind in (BFLOAT16, FLOAT8)
            }
    result = {
        "target": found["conditions"]["target"],
        "recipe": options.recipe.stem,
        "overrides": options.overrides,
        "bytes_per_token": size,
        "final_loss": trained,
        **found,
        "commit": git_sha(),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": hardware(),
        "seconds": round(time.perf_counter() - begun),
    }
    write_atomically(options.results / f"float8-{options.recipe.stem}.json", json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["float8_against_bfloat16"]), flush=True)


if __name__ == "__main__":
    run_main(main)
