"""Streaming hidden states against keeping them: the same draft trained both ways, wall time, disk and loss.

    python benchmarks/stored.py [--recipe recipes/tiny.yaml] [--folder FOLDER or s3://...] [section.field=value ...]

Three trainings of the same samples, one after the other: streamed; stored for the first time (captured, written, read);
stored before (read only). Generator and trainer run at the same time in each, as in a run.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import fsspec
from prepared import prepared_run

from infra.exit import run_main
from infra.files import write_atomically
from infra.provenance import git_sha, hardware

RESULT = Path(__file__).parent / "results" / "stored.json"
ROOT = Path(__file__).parents[1]
RUN_S = 3600


def train(path: Path, recipe: Path, overrides: list[str]) -> tuple[float, list[float]]:
    """Seconds from the start of both processes to the end of both, and the losses."""
    with prepared_run(path, recipe, ["training.log_steps=1", *overrides]) as run:
        begun = time.perf_counter()
        commands = (["models.capture.generator"], ["models.training.launch", "--ranks", "1"])
        processes = [
            subprocess.Popen([sys.executable, "-m", name, str(path), *options], stdout=subprocess.DEVNULL)
            for name, *options in commands
        ]
        if any(process.wait(RUN_S) for process in processes):
            raise ValueError(f"the run in {path} failed")
        taken = time.perf_counter() - begun
        return taken, [json.loads(line)["loss"] for line in run.folder.metrics.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "tiny.yaml")
    parser.add_argument("--folder", help="default: a temporary folder on this machine's disk")
    parser.add_argument("--json", type=Path, default=RESULT)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="draftsmith-stored-") as name:
        base = Path(name)
        url = options.folder or str(base / "kept")
        stored = [*options.overrides, "transport.kind=stored", f"transport.folder={url}"]
        ways = {"streamed": options.overrides, "stored, first time": stored, "stored before": stored}
        results = {
            way: train(base / way.replace(", ", "-").replace(" ", "-"), options.recipe, overrides)
            for way, overrides in ways.items()
        }
        files, root = fsspec.core.url_to_fs(url)
        kept = files.du(root)
    losses = [found for _, found in results.values()]
    result = {
        "commit": git_sha(),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": hardware(),
        "recipe": options.recipe.stem,
        "overrides": options.overrides,
        "where": url.partition("://")[0] if "://" in url else "local disk",
        "wall_s": {way: round(taken, 1) for way, (taken, _) in results.items()},
        "bytes_kept": {"streamed": 0, "stored": kept},
        "largest_difference_of_losses": max(
            abs(a - b) for other in losses[1:] for a, b in zip(losses[0], other, strict=True)
        ),
        "steps": len(losses[0]),
    }
    write_atomically(options.json, json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    run_main(main)
