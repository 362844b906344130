"""Paths of a run's files."""

import re
from dataclasses import dataclass
from pathlib import Path

CHECKPOINT = re.compile(r"step-(\d+)-(\d+)")
"""Name of a checkpoint's folder: its step, and the incarnation of the trainer that wrote it."""


@dataclass(frozen=True)
class RunFolder:
    """`runs/<name>/`: configuration, ledger, logs, checkpoints, export, report."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        """The resolved recipe (JSON of RunConfig)."""
        return self.path / "config.json"

    @property
    def run_lock(self) -> Path:
        """Held by the process that runs the run."""
        return self.path / "run.lock"

    @property
    def target(self) -> Path:
        return self.path / "target.json"

    @property
    def regenerated(self) -> Path:
        """The target's own answers, where the recipe asks for them."""
        return self.path / "regenerated.json"

    @property
    def samples(self) -> Path:
        return self.path / "samples.json"

    @property
    def plan(self) -> Path:
        """What the run was expected to take, before it took any device."""
        return self.path / "plan.json"

    @property
    def ledger_file(self) -> Path:
        return self.path / "ledger.sqlite"

    @property
    def ledger_url(self) -> str:
        return f"sqlite:///{self.ledger_file}"

    @property
    def start(self) -> Path:
        """Export of the draft that training begins with, if it does."""
        return self.path / "start"

    @property
    def heldout(self) -> Path:
        """The target's own text to a few held-out prompts, over which the draft walks while it trains."""
        return self.path / "heldout.safetensors"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint(self, step: int, incarnation: int) -> Path:
        """The checkpoint that a trainer of this incarnation writes at a step."""
        return self.checkpoints / f"step-{step:06d}-{incarnation}"

    def checkpoint_folders(self) -> list[Path]:
        """All checkpoint folders, committed or not, by step and incarnation."""
        found = [
            (match, path) for path in self.checkpoints.glob("step-*") if (match := CHECKPOINT.fullmatch(path.name))
        ]
        return [path for _, path in sorted(found, key=lambda pair: tuple(map(int, pair[0].groups())))]

    @property
    def metrics(self) -> Path:
        """One JSON object per logged training step."""
        return self.path / "metrics.jsonl"

    @property
    def generators(self) -> Path:
        """One JSON object each time that generators came or went."""
        return self.path / "generators.jsonl"

    @property
    def store(self) -> Path:
        """The record of the run's Mooncake store."""
        return self.path / "store.json"

    @property
    def training(self) -> Path:
        return self.path / "training.json"

    @property
    def export(self) -> Path:
        return self.path / "export"

    @property
    def exported(self) -> Path:
        """What `export` holds."""
        return self.path / "export.json"

    @property
    def benchmark(self) -> Path:
        return self.path / "benchmark.json"

    @property
    def request_counts(self) -> Path:
        """Tokens and verification steps of every benchmarked conversation."""
        return self.path / "request_counts.json"

    @property
    def gate(self) -> Path:
        """What the gate decided on."""
        return self.path / "gate.json"

    @property
    def champion(self) -> Path:
        """The version that was champion when the run's draft was benchmarked."""
        return self.path / "champion.json"

    @property
    def smoke(self) -> Path:
        """Whether the draft decodes, as it comes from the registry."""
        return self.path / "smoke.json"

    @property
    def served(self) -> Path:
        """The serving engine's figures."""
        return self.path / "served.json"

    @property
    def plots(self) -> Path:
        return self.path / "plots"

    @property
    def report(self) -> Path:
        return self.path / "report.json"

    @property
    def report_page(self) -> Path:
        """The report for people: one self-contained page."""
        return self.path / "report.html"
