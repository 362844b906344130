"""A tiny run on the pools of each cluster: generator and trainer find ledger, transport and each other."""

from contextlib import closing
from pathlib import Path

import pytest

from infra.data_plane.start import start_generator, start_trainer
from infra.pools.base import PoolSpec
from infra.processes.keep_running import Generators, follow
from infra.processes.process import Owner
from infra.records.data_path import TrainingResult


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ray", "slurm"])
def test_a_run_on_a_cluster_ends_well(kind: str, request: pytest.FixtureRequest, make_run, tmp_path: Path) -> None:
    place = request.getfixturevalue(f"{kind}_place")
    shared = ["transport.kind=files", f"transport.folder={tmp_path / 'shared'}"]
    folder = make_run("run", "data.max_samples=24", "training.max_steps=3", f"pools.kind={kind}", *shared)
    provider = place.provider()
    owner = Owner(f"{kind}-run", folder.logs)
    printed: list[str] = []
    try:
        specs = [PoolSpec("inference", 0), PoolSpec("training", 0)]  # the clusters' GPUs are only counted
        inference, training = place.acquire(provider, specs, owner)
        with (
            closing(start_generator(inference, folder, 0, 1, threads=1)) as generator,
            closing(start_trainer(training, folder, 1, threads=1)) as trainer,
        ):
            follow(trainer, Generators([generator]), printed.append, printed.append)
    finally:
        provider.release(owner.name)
    assert TrainingResult.read(folder.training).steps == 3, printed
