"""Whether drafts trained on SGLang's hidden states accept as much as those trained on transformers': several seeds.

    python benchmarks/engines.py [--recipe recipes/quickstart.yaml] [--seeds 0:3] [section.field=value ...]

Every run is the recipe's whole flow in a folder of its own; the acceptance lengths, on the same held-out prompts, come
from its report. The means are set against the spread between seeds. Stopped, it goes on with the runs that are missing.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from attempts import Attempts

from infra.files.atomic import write_atomically
from infra.processes.exit import run_main

RESULT = Path(__file__).parent / "results" / "engines.json"
ROOT = Path(__file__).parents[1]
ENGINES = ("transformers", "sglang")
QUICK = ("benchmark.reference_tokens=64", "benchmark.timed_tokens=16")
"""What is not compared here is kept short."""


def acceptance(recipe: Path, engine: str, seed: int, overrides: list[str]) -> dict[str, float]:
    """Run the flow and return the acceptance length by lookahead, simulated."""
    with tempfile.TemporaryDirectory(prefix="draftsmith-engines-") as runs:
        settings = [f"seed={seed}", f"generator.engine={engine}", *QUICK, *overrides]
        command = [str(Path(sys.executable).with_name("draftsmith")), "retrain", str(recipe), *settings]
        ended = subprocess.run(
            command, env={**os.environ, "DRAFTSMITH_RUNS": runs}, capture_output=True, text=True, check=False
        )
        if ended.returncode:
            raise ValueError(f"the run of seed {seed} with {engine} failed:\n{ended.stdout}{ended.stderr}")
        (report,) = Path(runs).glob("*/report.json")
        return json.loads(report.read_text())["acceptance"]["draft"]["length"]


def summary(lengths: dict[str, dict[str, float]]) -> dict[str, object]:
    """Means over the seeds that both engines have, and how far apart figures are."""
    seeds = [seed for seed in lengths[ENGINES[0]] if seed in lengths[ENGINES[1]]]
    pairs = [(lengths[ENGINES[0]][seed], lengths[ENGINES[1]][seed]) for seed in seeds]
    means = dict(zip(ENGINES, map(statistics.mean, zip(*pairs, strict=True)), strict=True))
    return {
        "mean": means,
        "difference_of_means": means["sglang"] - means["transformers"],
        "largest_difference_between_seeds_of_one_engine": max(max(one) - min(one) for one in zip(*pairs, strict=True)),
        "largest_difference_at_one_seed": max(abs(a - b) for a, b in pairs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "quickstart.yaml")
    parser.add_argument("--seeds", default="0:3", help="first:end")
    parser.add_argument("--lookahead", default="4")
    parser.add_argument("--json", type=Path, default=RESULT)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    settings = {
        "recipe": options.recipe.stem,
        "overrides": [*QUICK, *options.overrides],
        "lookahead": int(options.lookahead),
    }
    attempts = Attempts(options.json.with_suffix(".part.jsonl"), settings, ("seed", "engine"))
    done = {(row["seed"], row["engine"]) for row in attempts.newest}
    for seed, engine in ((seed, engine) for seed in range(*map(int, options.seeds.split(":"))) for engine in ENGINES):
        if (seed, engine) not in done:
            length = acceptance(options.recipe, engine, seed, options.overrides)[options.lookahead]
            attempts.keep({"seed": seed, "engine": engine, "acceptance_length": length})
            print(f"seed {seed}, {engine}: acceptance length {length:.4f}", flush=True)
    lengths: dict[str, dict[str, float]] = {engine: {} for engine in ENGINES}
    for row in attempts.newest:
        lengths[row["engine"]][str(row["seed"])] = row["acceptance_length"]
    result = attempts.under() | settings | {"acceptance_length_by_seed": lengths} | summary(lengths)
    write_atomically(options.json, json.dumps(result | {"rows": attempts.newest}, indent=1) + "\n")
    attempts.path.unlink()
    print(f"{result['mean']}: {options.json}")


if __name__ == "__main__":
    run_main(main)
