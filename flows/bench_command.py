"""`draftsmith bench`: acceptance and speed of a draft on suites of prompts."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import typer

from flows.drafts_command import check_registry
from infra.pools.base import Pool, PoolBusyError, PoolSpec
from infra.pools.local import LocalPools, check_left
from infra.processes.control_groups import cores
from infra.processes.process import Owner
from infra.refusal import Refusal
from infra.settings import unless_set, visible_devices
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
        with _leased(Path(folder)) as pool:
            threads = unless_set({"OMP_NUM_THREADS": str(cores())})
            environment = {**os.environ, **threads, "CUDA_VISIBLE_DEVICES": ",".join(pool.gpus)}
            # The child keeps the locks if this process is killed.
            ended = subprocess.run(command, env=environment, pass_fds=pool.owner.locks, check=False)
        raise typer.Exit(ended.returncode)


@contextmanager
def _leased(folder: Path) -> Iterator[Pool]:
    """The GPUs that $CUDA_VISIBLE_DEVICES names, else one where there is one.

    Raises Refusal for busy ones, and where no GPU of this machine can be leased.
    """
    pools, named, owner = LocalPools(), visible_devices(), Owner(f"bench-{os.getpid()}", folder)
    check_left(pools.gpus)
    count = min(1, len(pools.gpus)) if named is None else len(named)
    try:
        (pool,) = pools.acquire([PoolSpec("inference", count)], owner)
    except PoolBusyError as error:
        raise Refusal(f"{error}; wait for them, or measure on the CPU (CUDA_VISIBLE_DEVICES=)") from error
    try:
        yield pool
    finally:
        pools.release(owner.name)


def _champion(name: str, folder: Path) -> Path:
    """The export of a registered model's champion. Raises Refusal if it has none, or MLflow does not answer."""
    check_registry()
    from infra.settings import tracking_uri
    from infra.tracking import registry

    found = registry.champion(tracking_uri(), name)
    if found is None:
        raise Refusal(f"--champion-of {name}: no version is champion; `draftsmith drafts list` shows what there is")
    return registry.download(tracking_uri(), found, folder / "champion")
