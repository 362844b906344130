"""Whether generator and trainer keep each other busy: each on a core of its own, the slower one should never wait.

    python benchmarks/pipeline.py [--settings tiny tiny-fast-trainer gemma] [--samples 1600]

The real generator and the real trainer of a recipe run over the arena, each pinned to one core. From the second
progress line to the last but one, for each side: `busy`, the share of time in which it did not wait for the other (the
trainer's own data wait; the generator's seconds of prefill and of writing), and `cpu`, its CPU seconds per second,
which also sees what it waits for besides, and what it does besides. The bar is for the busier side.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import sqlalchemy as sa
from prepared import prepared_run

from infra.files.atomic import write_atomically
from infra.ledger.schema import samples
from infra.provenance import git_sha, hardware, versions
from models.run import PreparedRun

RESULT = Path(__file__).parent / "results" / "pipeline.json"
BAR = 0.95
RECIPES = Path(__file__).parents[1] / "recipes"
LOGS = ["training.log_steps=10", "training.threads=1", "generator.threads=1"]
SETTINGS: dict[str, tuple[str, list[str]]] = {
    "tiny": ("tiny.yaml", []),
    "tiny-fast-trainer": ("tiny.yaml", ["draft.ttt_steps=1", "draft.vocab_size=64", "draft.intermediate_size=64"]),
    "gemma": ("quickstart.yaml", ["data.max_samples=120", "training.log_steps=2"]),
}
"""Recipe, and what is changed: in the second the draft is so small that the generator is the slower side."""
POLL_S = 0.02
LIMIT_S = 1800.0


@contextmanager
def pinned(core: int, module: str, run: PreparedRun, *arguments: str) -> Iterator[psutil.Process]:
    """A process of the data plane on one core; killed with its children where it is left."""
    started = subprocess.Popen(
        [sys.executable, "-m", module, str(run.folder.path), *arguments],
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),  # noqa: PLW1509 (no thread of this process holds a lock)
    )
    process = psutil.Process(started.pid)
    try:
        yield process
        if started.wait(timeout=LIMIT_S):
            raise ChildProcessError(f"{module} ended with {started.returncode}")
    finally:
        if started.poll() is None:
            for one in [*process.children(recursive=True), process]:
                one.kill()
            started.wait()


@dataclass(frozen=True)
class Moment:
    """Where both sides are."""

    at: float
    """Seconds since 1970, as the ledger has them."""
    generator_s: float
    """CPU seconds so far."""
    trainer_s: float


def cpu_seconds(process: psutil.Process) -> float:
    used = [one.cpu_times() for one in [process, *process.children(recursive=True)]]
    return sum(one.user + one.system for one in used)


def lines(run: PreparedRun) -> list[dict[str, Any]]:
    metrics = run.folder.metrics
    return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.is_file() else []


def wait_for(run: PreparedRun, count: int, sides: tuple[psutil.Process, psutil.Process]) -> Moment:
    """The moment at which the trainer has written `lines` progress lines."""
    deadline = time.monotonic() + LIMIT_S
    while len(lines(run)) < count:
        if time.monotonic() > deadline or not all(side.is_running() for side in sides):
            raise TimeoutError(f"no {count} lines of progress; see what generator and trainer said")
        time.sleep(POLL_S)
    generator, trainer = sides
    return Moment(time.time(), cpu_seconds(generator), cpu_seconds(trainer))


def capture_seconds(run: PreparedRun, first: Moment, last: Moment) -> float:
    """The generator's seconds of prefill and of writing, of samples published in between."""
    query = sa.select(sa.func.sum(samples.c.prefill_s + samples.c.put_s)).where(
        samples.c.published.between(first.at, last.at)
    )
    with run.open_ledger().read() as rows:
        return rows.scalar(query) or 0.0


def measure(run: PreparedRun) -> dict[str, Any]:
    """Both sides over the middle of the run."""
    settings = run.config.training
    count = settings.total_steps(run.samples.train_samples) // settings.log_steps
    with (
        pinned(0, "models.capture.generator", run) as generator,
        pinned(1, "models.training.launch", run, "--ranks", "1") as trainer,
    ):
        first = wait_for(run, 2, (generator, trainer))
        last = wait_for(run, count - 1, (generator, trainer))
    written = lines(run)[2 : count - 1]
    before = lines(run)[1]
    span = written[-1]["seconds"] - before["seconds"]
    starts = [line["seconds"] for line in (before, *written)]
    waited = sum(
        line["data_wait_share"] * (end - start) for line, start, end in zip(written, starts, starts[1:], strict=False)
    )
    seconds = last.at - first.at
    sides = {
        "generator": {
            "busy": capture_seconds(run, first, last) / seconds,
            "cpu": (last.generator_s - first.generator_s) / seconds,
        },
        "trainer": {"busy": 1 - waited / span, "cpu": (last.trainer_s - first.trainer_s) / seconds},
    }
    slower = max(sides, key=lambda side: sides[side]["busy"])
    return {
        "seconds": seconds,
        "tokens_per_s": (written[-1]["tokens"] - before["tokens"]) / span,
        "sides": sides,
        "slower": slower,
        "holds": sides[slower]["busy"] >= BAR,
    }


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--samples", type=int, help="instead of the recipe's")
    parser.add_argument("--json", type=Path, default=RESULT)
    arguments = parser.parse_args(given)
    result: dict[str, Any] = {
        "commit": git_sha(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "versions": versions(),
        "bar": BAR,
        "settings": {},
    }
    for name in arguments.settings:
        recipe, changes = SETTINGS[name]
        overrides = ["transport.kind=arena", *LOGS, *changes]
        overrides += [f"data.max_samples={arguments.samples}"] if arguments.samples else []
        with tempfile.TemporaryDirectory(prefix="draftsmith-") as folder:
            path = Path(folder) / f"pipeline-{os.getpid()}-{name}"
            with prepared_run(path, RECIPES / recipe, overrides) as run:
                result["settings"][name] = {"recipe": recipe, "changes": overrides} | measure(run)
        print(name, json.dumps(result["settings"][name], indent=2), flush=True)
        write_atomically(arguments.json, json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
