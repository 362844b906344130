"""`draftsmith bench`: acceptance and speed of a draft on suites of prompts."""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import typer

from infra.refusal import Refusal
from models.config.bench_arguments import bench_parser

PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Typer's settings of this command: `bench_parser` reads all of its options."""


def bench(context: typer.Context) -> None:
    """Measure a draft beside baselines: acceptance by category and context length, speed by batch size."""
    options = bench_parser().parse_args(context.args)
    if options.champion and options.champion_of:
        raise Refusal("--champion and --champion-of both name what to compare with: leave one of them out")
    command = [sys.executable, "-m", "models.benchmark.standalone", *context.args]
    with TemporaryDirectory(prefix="draftsmith-bench-") as folder:
        if options.champion_of:
            command += ["--champion", str(_champion(options.champion_of, Path(folder)))]
        raise typer.Exit(subprocess.run(command, check=False).returncode)


def _champion(name: str, folder: Path) -> Path:
    """The export of a registered model's champion. Raises Refusal if it has none."""
    from infra.settings import tracking_uri
    from infra.tracking import registry

    found = registry.champion(tracking_uri(), name)
    if found is None:
        raise Refusal(f"--champion-of {name}: no version is champion; `draftsmith drafts list` shows what there is")
    return registry.download(tracking_uri(), found, folder / "champion")
