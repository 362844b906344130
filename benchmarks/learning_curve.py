"""Whether twice the data brings what the learning curve says: runs of the tiny recipe, and runs with twice its samples.

    python benchmarks/learning_curve.py [--seeds 10] [--samples 800] [--work FOLDER]

For each seed, one draft is trained on `--samples` samples and another on twice as many. Held-out acceptance is measured
every 20 steps. The first run's forecast (models/training/learning_curve.py) is compared with what the second reached.
Started again with the same folder, it resumes; drafts of another commit are trained again.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median

from prepared import trained_export

from infra.files.atomic import write_atomically
from infra.files.run_folder import RunFolder
from infra.processes.exit import run_main
from infra.provenance import git_sha, hardware, versions
from infra.records.data_path import TrainingResult
from models.training.learning_curve import forecast, measured_points

RESULTS = Path(__file__).parent / "results"
RECIPE = Path(__file__).parents[1] / "recipes" / "tiny.yaml"
MEASURED = ["training.heldout_steps=20", "training.log_steps=20", "training.heldout_prompts=32"]


def trained(path: Path, seed: int, samples: int) -> RunFolder:
    folder = RunFolder(path / f"{seed}-{samples}-{git_sha()}")
    if not folder.training.is_file():
        trained_export(folder.path, RECIPE, [f"seed={seed}", f"data.max_samples={samples}", *MEASURED])
    return folder


def one_seed(work: Path, seed: int, samples: int) -> dict[str, float | bool | str | None]:
    """The forecast, what came, and whether it lies in the band."""
    short, long = (trained(work, seed, size) for size in (samples, 2 * samples))
    told = forecast(measured_points(short.metrics), widest=float("inf"))
    ends = [measured_points(run.metrics)[-1].length for run in (short, long)]
    gain = ends[1] - ends[0]
    return {
        "seed": seed,
        "tokens": TrainingResult.read(short.training).tokens,
        "length": round(ends[0], 3),
        "lower": told.lower and round(told.lower, 3),
        "upper": told.upper and round(told.upper, 3),
        "gain": round(gain, 3),
        "inside": told.lower is not None and told.upper is not None and told.lower <= gain <= told.upper,
        "would_be_told": forecast(measured_points(short.metrics)).lower is not None,
        "why": told.why,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--samples", type=int, default=800)
    parser.add_argument("--work", type=Path, default=Path("runs/.learning_curve"))
    parser.add_argument("--json", type=Path, default=RESULTS / "learning_curve.json")
    options = parser.parse_args()
    found = []
    for seed in range(options.seeds):
        found.append(one_seed(options.work, seed, options.samples))
        print(json.dumps(found[-1]), flush=True)
    widths = [one["upper"] - one["lower"] for one in found if one["lower"] is not None]
    result = {
        "commit": git_sha(),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": hardware(),
        "versions": versions(),
        "recipe": "recipes/tiny.yaml",
        "samples": [options.samples, 2 * options.samples],
        "inside": sum(bool(one["inside"]) for one in found),
        "told_by_default": sum(bool(one["would_be_told"]) for one in found),
        "width_median": round(median(widths), 3) if widths else None,
        "seeds": found,
    }
    write_atomically(options.json, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    run_main(main)
