"""What drafts learn from the same text by AdamW and by Muon, each at several learning rates.

    python benchmarks/optimizers.py [--recipe tiny] [--samples 600] [--seeds 2] [--draft JSON] [--name eagle3]
        [--adamw 2e-3 5e-3 1.2e-2] [--muon 5e-3 1e-2 2e-2]

Every training sees the same captured samples in the same order, with the recipe's draft, batch, schedule and moving
average; seeds are of the draft's first weights. The acceptance length is that of the walk over the target's own sampled
text of held-out prompts, at lookahead 4: with proposals drawn from the draft's distribution, and with greedy ones. CPU
seconds are of the training alone, on one thread. A file of results that is there keeps what it has of other recipes and
drafts.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

from attempts import kept_parts
from machine import measured_here
from offline import averaged, capture, train
from prepared import prepared_run

from infra.files.atomic import write_atomically
from infra.processes.exit import run_main
from infra.provenance import versions
from models.benchmark.conditions import sampled_law
from models.benchmark.contestants import Contestants
from models.benchmark.measure import DRAFT, at, walk_texts
from models.data.prompts import heldout_prompts
from models.decoding.acceptance import acceptance_length
from models.drafts.sampling import Sampling
from models.dtypes import DTYPES
from models.run import PreparedRun
from models.targets.model import TargetModel, eos_ids
from models.targets.recommended import recommended_sampling
from models.targets.tiny import one_thread
from models.training.lightning_module import DraftModule

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "optimizers.json"
LOOKAHEAD, CHUNK = 4, 256
OPTIMIZERS = ("adamw", "muon")


def measured(run: PreparedRun, target: TargetModel, module: DraftModule) -> dict[str, Any]:
    """Acceptance of the averaged weights, in the target's data type."""
    path, config = Path(run.target.path), run.config.benchmark
    with averaged(module, target.head_weight.dtype) as draft:
        contestants = Contestants(target, lambda: target, [draft], eos_ids(path), recommended_sampling(path))
        law: Sampling = sampled_law(config, contestants.recommended)
        prompts = heldout_prompts(run.open_samples("heldout"), config)
        found = walk_texts(contestants, config, "sampled", prompts, {DRAFT: draft}, sampling=law, seed=0)
    walks = {"drawn": found.drawn[DRAFT], "greedy": found.walks[DRAFT]}
    return {name: round(acceptance_length(at(walk, LOOKAHEAD)), 3) for name, walk in walks.items()}


def compare(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All optimizers and rates over all seeds."""
    overrides = [f"data.max_samples={options.samples}", *([f"draft={options.draft}"] if options.draft else [])]
    with prepared_run(folder / "run", ROOT / "recipes" / f"{options.recipe}.yaml", overrides) as run:
        target = TargetModel.load(
            Path(run.target.path), run.config.target.aux_layer_ids, DTYPES[run.config.capture_dtype]
        )
        batches, trials = capture(run, target), list[dict[str, Any]]()
        rated = [(name, rate) for name in OPTIMIZERS for rate in getattr(options, name)]
        for (optimizer, rate), seed in product(rated, range(options.seeds)):
            settings = run.config.training.model_copy(update={"optimizer": optimizer, "learning_rate": rate})
            seeded = replace(run, config=run.config.model_copy(update={"seed": seed}))
            module, cpu_s = train(seeded, batches, settings)
            trial = {"optimizer": optimizer, "learning_rate": rate, "seed": seed, "cpu_s": round(cpu_s, 1)}
            trials.append(trial | measured(run, target, module))
            print(json.dumps(trials[-1]), flush=True)
        return {
            "recipe": options.recipe,
            "draft": run.config.draft.model_dump(mode="json"),
            "dtypes": {"target": run.config.capture_dtype, "training": run.config.training_dtype},
            "training_tokens": sum(len(batch.tokens) for batch in batches),
            "steps": len(batches),
            "prompts": run.config.benchmark.prompts,
            "lookahead": LOOKAHEAD,
            "best": best(trials),
            "trials": trials,
        }


def best(trials: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The learning rate of each optimizer with the greatest mean over seeds, and the mean."""
    found: dict[str, Any] = {}
    for name in OPTIMIZERS:
        own = [trial for trial in trials if trial["optimizer"] == name]
        rates = sorted({trial["learning_rate"] for trial in own})
        means = {rate: mean(one["drawn"] for one in own if one["learning_rate"] == rate) for rate in rates}
        rate = max(means, key=lambda each: means[each])
        lengths = [one["drawn"] for one in own if one["learning_rate"] == rate]
        cpu_s = mean(one["cpu_s"] for one in own)
        found[name] = {"learning_rate": rate, "drawn": round(mean(lengths), 3), "seeds": lengths, "cpu_s": round(cpu_s)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="tiny", choices=["tiny", "quickstart"])
    parser.add_argument("--samples", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--draft", help="another draft than the recipe's, as JSON")
    parser.add_argument("--name", default="eagle3", help="of the draft, in the file of results")
    parser.add_argument("--adamw", type=float, nargs="+", default=[2e-3, 5e-3, 1.2e-2])
    parser.add_argument("--muon", type=float, nargs="+", default=[5e-3, 1e-2, 2e-2])
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    with one_thread(), TemporaryDirectory() as folder:
        found = compare(options, Path(folder))
    known = kept_parts(json.loads(options.out.read_text()), "comparisons") if options.out.is_file() else {}
    found = measured_here() | {"versions": versions()} | found
    result = measured_here() | {"comparisons": known | {f"{options.recipe}, {options.name}": found}}
    write_atomically(options.out, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    run_main(main)
