"""Streaming hidden states against keeping them: the same draft trained both ways, time, disk and loss.

    python benchmarks/stored.py [--recipe recipes/tiny.yaml] [--folder FOLDER or s3://...] [--rounds 2]
        [section.field=value ...]

Three trainings of the same samples, one after the other: streamed; stored for the first time (captured, written, read);
stored before (read only: the target is never asked). Streaming comes first in one round and last in the next; figures
are means over the rounds. Generator and trainer run at the same time in each, as in a run.
`wall_s` is from the start of both to the end of both, `training_s` from the first step's end to the last one's,
`cpu_s` what each of the two used in all, imports included: where other work shares the cores, compare that.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import fsspec
from machine import measured_here
from prepared import prepared_run

from infra.files.atomic import write_atomically
from infra.processes.exit import run_main
from infra.provenance import versions

RESULT = Path(__file__).parent / "results" / "stored.json"
ROOT = Path(__file__).parents[1]
RUN_S = 3600
POLL_S = 0.02


@dataclass(frozen=True)
class Trained:
    """What one of the trainings took, and came to."""

    wall_s: float
    training_s: float
    cpu_s: dict[str, float]
    tokens: int
    losses: list[float]


def train(path: Path, recipe: Path, overrides: list[str]) -> Trained:
    """Raises ValueError when a process fails, TimeoutError when one does not end."""
    with prepared_run(path, recipe, ["training.log_steps=1", *overrides]) as run:
        begun = time.perf_counter()
        commands = {"generator": ["models.capture.generator"], "trainer": ["models.training.launch", "--ranks", "1"]}
        processes = {
            role: subprocess.Popen([sys.executable, "-m", name, str(path), *options], stdout=subprocess.DEVNULL)
            for role, (name, *options) in commands.items()
        }
        cpu_s = follow(processes)
        wall_s = time.perf_counter() - begun
        lines = [json.loads(line) for line in run.folder.metrics.read_text().splitlines()]
        training_s = lines[-1]["seconds"] - lines[0]["seconds"]
        return Trained(wall_s, training_s, cpu_s, run.samples.train_tokens, [line["loss"] for line in lines])


def follow(processes: "dict[str, subprocess.Popen[bytes]]") -> dict[str, float]:
    """CPU seconds of each with its children, once all have ended well; none is left whatever happens."""
    deadline, cpu_s = time.monotonic() + RUN_S, dict[str, float]()
    try:
        while len(cpu_s) < len(processes):
            for role, process in processes.items():
                if role in cpu_s:
                    continue
                pid, status, used = os.wait4(process.pid, os.WNOHANG)
                if pid:
                    process.returncode = os.waitstatus_to_exitcode(status)
                    cpu_s[role] = used.ru_utime + used.ru_stime
                    if process.returncode:
                        raise ValueError(f"the {role} failed: its output is above")
            if time.monotonic() > deadline:
                raise TimeoutError(f"not done after {RUN_S} s")
            time.sleep(POLL_S)
    finally:
        for process in processes.values():
            if process.returncode is None:
                process.kill()
                process.wait(60)
    return cpu_s


def one_round(base: Path, number: int, url: str, options: argparse.Namespace) -> dict[str, Trained]:
    """The three ways, streaming first in even rounds and last in odd ones."""
    stored = [*options.overrides, "transport.kind=stored", f"transport.folder={url}/{number}"]
    ways = {"stored, first time": stored, "stored before": stored}
    ways = ways | {"streamed": options.overrides} if number % 2 else {"streamed": options.overrides} | ways
    return {
        way: train(base / f"{number}-{way.replace(', ', '-').replace(' ', '-')}", options.recipe, overrides)
        for way, overrides in ways.items()
    }


def mean(seconds: Iterable[float]) -> float:
    return round(fmean(seconds), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "tiny.yaml")
    parser.add_argument("--folder", help="default: a temporary folder on this machine's disk")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--beside", default="nothing", help="what else the machine did, for the record")
    parser.add_argument("--json", type=Path, default=RESULT)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    rounds: list[dict[str, Trained]] = []
    with tempfile.TemporaryDirectory(prefix="draftsmith-stored-") as name:
        url = options.folder or str(Path(name) / "kept")
        for number in range(options.rounds):
            rounds.append(one_round(Path(name), number, url, options))
        files, root = fsspec.core.url_to_fs(f"{url}/0")
        kept = files.du(root)
    losses = [found.losses for results in rounds for found in results.values()]
    result = measured_here() | {
        "beside": options.beside,
        "versions": versions(),
        "recipe": options.recipe.stem,
        "overrides": options.overrides,
        "where": url.partition("://")[0] if "://" in url else "local disk",
        "steps": len(losses[0]),
        "tokens": rounds[0]["streamed"].tokens,
        "wall_s": {way: mean(results[way].wall_s for results in rounds) for way in rounds[0]},
        "training_s": {way: mean(results[way].training_s for results in rounds) for way in rounds[0]},
        "cpu_s": {
            way: {role: mean(results[way].cpu_s[role] for results in rounds) for role in found.cpu_s}
            for way, found in rounds[0].items()
        },
        "wall_s_of_rounds": [{way: round(found.wall_s, 1) for way, found in results.items()} for results in rounds],
        "bytes_kept": {"streamed": 0, "stored": kept},
        "largest_difference_of_losses": max(
            abs(a - b) for other in losses[1:] for a, b in zip(losses[0], other, strict=True)
        ),
    }
    write_atomically(options.json, json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    run_main(main)
