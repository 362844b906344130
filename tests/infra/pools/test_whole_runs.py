"""A tiny run on the pools of each cluster: generator and trainer find ledger, transport and each other."""

import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest

from infra.config import PoolsConfig, TransportConfig
from infra.data_plane.serving import ServerSpan
from infra.data_plane.start import start_generator, start_trainer
from infra.files.run_folder import RunFolder
from infra.network.ports import HOST
from infra.pools.base import PoolBusyError, PoolSpec
from infra.pools.local import LocalPool
from infra.pools.queued import QueuedPool, QueuedPools
from infra.pools.run_pools import pool_specs
from infra.processes.keep_running import Generators, follow
from infra.processes.process import Owner
from infra.records.data_path import TargetRecord, TrainingResult
from infra.transport.mooncake.environment import check_mooncake
from infra.transport.mooncake.store import start_store
from models.config.target import TargetConfig
from models.targets.prepare import prepare_target
from tests.conftest import prepare_run

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from target_families import FAMILIES, write


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ray", pytest.param("slurm", marks=pytest.mark.long)])
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param("ray", marks=pytest.mark.long), "slurm"])
def test_ranks_on_two_machines_of_a_cluster(
    kind: str, request: pytest.FixtureRequest, make_run, public_folder: Path
) -> None:
    """Each part wants more than half of a machine's cores, so there is one on each, and a part of the store with it.

    In Ray this is what `test_a_trainer_moves_off_a_lost_machine_in_ray` begins with.
    """
    try:
        check_mooncake()
    except ValueError as error:
        pytest.skip(str(error))
    place = request.getfixturevalue(f"{kind}_place")
    config = place.provider()._config.model_copy(update={"cores": 10, "training_machines": 2})
    settings = ["data.max_samples=24", "training.max_steps=3", "training.ranks=2", f"pools.kind={kind}"]
    folder = make_run("run", *settings, "transport.kind=mooncake", "pools.training_machines=2")
    provider, owner = QueuedPools(config), Owner(f"{kind}-machines", folder.logs)
    transport = TransportConfig(kind="mooncake", budget_mib=64)
    printed: list[str] = []
    try:
        _, wanted = pool_specs(config, 1)
        (training,) = place.acquire(provider, [wanted], owner)
        assert len({part.machine for part in training._granted}) == 2
        home = LocalPool(owner)
        with (
            start_store(home, folder, transport, public_folder, printed.append, holders=training, parts=2) as store,
            closing(start_generator(home, folder, 0, 1, threads=1)) as generator,
            closing(start_trainer(training, folder, 2, threads=1, machines=2)) as trainer,
        ):
            follow(trainer, Generators([generator]), printed.append, printed.append, services=store)
    finally:
        provider.release(owner.name)
    assert TrainingResult.read(folder.training).steps == 3, printed
    assert sum("store ready" in line for line in printed) == 2, printed
    assert not any("restart" in line for line in printed), printed


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ray", "slurm"])
def test_a_generator_on_two_machines_of_a_cluster(
    kind: str, request: pytest.FixtureRequest, tiny_target: TargetRecord, tmp_path: Path, monkeypatch
) -> None:
    """A real SGLang server over both; each part wants more than half of a machine's cores."""
    place = request.getfixturevalue(f"{kind}_place")
    config = place.provider()._config.model_copy(update={"cores": 10, "machines_per_generator": 2})
    family = write(FAMILIES["qwen3"], tmp_path / "qwen3", Path(tiny_target.path))
    target = prepare_target(TargetConfig(name=str(family), aux_layer_ids=(0, 1, 2)))
    settings = ["data.max_samples=24", "training.max_steps=3", "draft.vocab_size=700", f"pools.kind={kind}"]
    settings += ["generator.engine=sglang", "generator.sglang.tensor_parallel=2", "pools.machines_per_generator=2"]
    settings += ["transport.kind=files", f"transport.folder={tmp_path / 'shared'}"]
    monkeypatch.setenv("DRAFTSMITH_SHM", str(tmp_path))
    folder = prepare_run(tmp_path / "run", target, *settings)
    provider, owner = QueuedPools(config), Owner(f"{kind}-generator", folder.logs)
    printed: list[str] = []
    try:
        wanted, _ = pool_specs(config, 1)
        (inference,) = place.acquire(provider, [wanted], owner)
        assert len({part.machine for part in inference._granted}) == 2
        with (
            closing(start_generator(inference, folder, 0, 1, 1, ServerSpan(2, HOST))) as generator,
            closing(start_trainer(LocalPool(owner), folder, 1, threads=1)) as trainer,
        ):
            follow(trainer, Generators([generator]), printed.append, printed.append)
    finally:
        provider.release(owner.name)
    assert TrainingResult.read(folder.training).steps == 3, printed
    assert not any("restart" in line for line in printed), printed
    assert "machine 1 of 2 is ready" in (folder.logs / "generator-0-machine-1.log").read_text()


@pytest.mark.slow
def test_a_trainer_moves_off_a_lost_machine_in_ray(breakable_ray: str, make_run, tmp_path: Path) -> None:
    """The raylet of the second machine is killed; what it ran ends, and a third machine takes its place."""
    ray = {"kind": "ray", "ray": {"address": breakable_ray}, "cores": 10, "training_machines": 2}
    config = PoolsConfig.model_validate(ray)
    settings = ["data.max_samples=48", "training.max_steps=12", "training.ranks=2", "training.checkpoint_steps=1"]
    shared = ["transport.kind=files", f"transport.folder={tmp_path / 'shared'}", "training.samples_per_step=4"]
    folder = make_run("run", *settings, *shared)
    provider, owner = QueuedPools(config), Owner("ray-machines", folder.logs)
    printed: list[str] = []
    events: list[str] = []

    def lose_a_machine() -> None:
        if not events and folder.checkpoint(2, 1).exists():
            (launcher,) = launchers(folder, "1")
            # Training must not end before Ray notices.
            for rank in launcher.children():
                rank.suspend()
            raylet = int(launcher.environ()["RAY_RAYLET_PID"])
            psutil.Process(raylet).kill()
            events.append(f"lost {raylet}")

    try:
        (training,) = acquire(provider, pool_specs(config, 1)[1], owner)
        with (
            closing(start_generator(LocalPool(owner), folder, 0, 1, threads=1)) as generator,
            closing(start_trainer(training, folder, 2, threads=1, machines=2)) as trainer,
        ):
            follow(trainer, Generators([generator]), printed.append, events.append, [lose_a_machine])
    finally:
        provider.release(owner.name)
    assert TrainingResult.read(folder.training).steps == 12, printed
    assert events[0].startswith("lost"), events
    assert all("; restart " in event for event in events[1:]), events
    assert len(events) > 1


def launchers(folder: RunFolder, machine: str) -> list[psutil.Process]:
    """The launcher of a machine, and not its supervisor."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if command[1:3] == ["-m", "models.training.launch"] and str(folder.path) in command:
            found += [process] if command[command.index("--machine") + 1] == machine else []
    return found


def acquire(provider: QueuedPools, spec: PoolSpec, owner: Owner) -> Sequence[QueuedPool]:
    """Wait until the cluster admits."""
    while True:
        with suppress(PoolBusyError):
            return provider.acquire([spec], owner)
