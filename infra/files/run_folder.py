"""Paths of a run's files."""

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from infra.refusal import Refusal

CHECKPOINT = re.compile(r"step-(\d+)-(\d+)")
"""Name of a checkpoint's folder: its step, and the incarnation of the trainer that wrote it."""


class _Place:
    """A path of a fixed name inside a run's folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: "RunFolder", _owner: type) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunFolder:
    """`runs/<name>/`: configuration, ledger, logs, checkpoints, export, report."""

    path: Path

    config = _Place("config.json")
    """The resolved recipe (JSON of RunConfig)."""
    run_lock = _Place("run.lock")
    """Held by the process that runs the run."""
    processes_lock = _Place("processes.lock")
    """Held by the supervisors of the run's processes too."""
    recoveries = _Place("recoveries.json")
    target = _Place("target.json")
    precision = _Place("precision.json")
    """At which precision the target's hidden states are captured."""
    regenerated = _Place("regenerated.json")
    """The target's own answers, where the recipe asks for them."""
    live = _Place("live.jsonl")
    """The first requests of the servers' users, where a run learns from them."""
    samples = _Place("samples.json")
    plan = _Place("plan.json")
    """What the run was expected to take, before it took any device."""
    sharing = _Place("sharing.json")
    """How generators and trainer share the devices."""
    ledger_file = _Place("ledger.sqlite")
    start = _Place("start")
    """Export of the draft that training begins with, if it does."""
    heldout = _Place("heldout.safetensors")
    """The target's own text to a few held-out prompts, over which the draft walks while it trains."""
    logs = _Place("logs")
    checkpoints = _Place("checkpoints")
    metrics = _Place("metrics.jsonl")
    """One JSON object per logged training step."""
    generators = _Place("generators.jsonl")
    """One JSON object each time that generators came or went."""
    devices = _Place("devices.jsonl")
    """One JSON object each time that a lease of GPUs began or ended."""
    gpu_use = _Place("gpu_use")
    """How busy these were: a file for each process."""
    store = _Place("store.json")
    """The record of the run's Mooncake store."""
    store_parts = _Place("store")
    """How Mooncake names the parts of its memory."""
    meetings = _Place("meetings")
    """Where the trainer's machines find each other, if there are several."""
    training = _Place("training.json")
    export = _Place("export")
    exported = _Place("export.json")
    """What `export` holds."""
    stitched = _Place("stitched")
    """The target with a trained MTP layer in place of its own; hard links to the target's other files."""
    tracking = _Place("tracking.json")
    """Which run of MLflow is this one's."""
    benchmark = _Place("benchmark.json")
    request_counts = _Place("request_counts.json")
    """Tokens and verification steps of every benchmarked conversation."""
    gate = _Place("gate.json")
    """What the gate decided on."""
    champion = _Place("champion.json")
    """The version that was champion when the run's draft was benchmarked."""
    smoke = _Place("smoke.json")
    """Whether the draft decodes, as it comes from the registry."""
    served = _Place("served.json")
    """The serving engine's figures."""
    failure = _Place("failure.txt")
    """Why the run stopped last, where that was an error; the next attempt removes it."""
    plots = _Place("plots")
    report = _Place("report.json")
    report_page = _Place("report.html")
    """The report for people: one self-contained page."""

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def ledger_url(self) -> str:
        return f"sqlite:///{self.ledger_file}"

    def checkpoint(self, step: int, incarnation: int) -> Path:
        """The checkpoint that a trainer of this incarnation writes at a step."""
        return self.checkpoints / f"step-{step:06d}-{incarnation}"

    def checkpoint_folders(self) -> list[Path]:
        """All checkpoint folders, committed or not, by step and incarnation."""
        found = [
            (match, path) for path in self.checkpoints.glob("step-*") if (match := CHECKPOINT.fullmatch(path.name))
        ]
        return [path for _, path in sorted(found, key=lambda pair: tuple(map(int, pair[0].groups())))]


def no_run(run: str, runs: Path) -> Refusal:
    """The refusal of a run that is not among these."""
    return Refusal(
        f"no run {run:.200}: neither a run folder's path nor a name below {runs}, or it is closed to you; "
        "`clean-up` removes old runs, whose reports are in MLflow"
    )


def newest_runs(runs: Path) -> list[RunFolder]:
    """The runs in a folder, by the time of their configuration, the newest first.

    Without those that are just being made or removed, whose names have a dot.
    """
    found: list[tuple[float, Path]] = []
    for config in runs.glob("[!.]*/config.json"):
        with suppress(FileNotFoundError):  # removed meanwhile
            found.append((config.stat().st_mtime, config.parent))
    return [RunFolder(path) for _, path in sorted(found, reverse=True)]
