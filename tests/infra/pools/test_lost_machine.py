"""A generator whose machine is lost is replaced on devices of its own, on a real Ray and a real Slurm cluster."""

import subprocess
import time
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import psutil
import pytest

from infra.data_plane.bottleneck import Elasticity
from infra.data_plane.elastic_generators import ElasticGenerators
from infra.files.run_folder import RunFolder
from infra.pools.base import Pool, PoolBusyError, PoolSpec
from infra.pools.local import LocalPool, LocalPools
from infra.pools.run_pools import SinglePools
from infra.processes.keep_running import Generators, KeptProcess, follow
from infra.processes.process import Owner, ProcessFailedError
from infra.records.data_path import generators_changes

WAIT_S = 400.0


def start(pool: Pool, index: int, share: int | None = None) -> KeptProcess:
    """In place of a generator: says that it is there, and stays."""
    launch = partial(pool.launch, f"generator-{index}", ["sh", "-c", "echo up; sleep 600"], index=share)
    return KeptProcess(launch, restarts=1, backoff_s=0.1)


def lives(folder: RunFolder, index: int) -> int:
    log = folder.logs / f"generator-{index}.log"
    return log.read_text().split().count("up") if log.is_file() else 0


def numbers(folder: RunFolder) -> list[int]:
    """Of generators, one after the other."""
    return [change.generators for change in generators_changes(folder.generators)]


def singles(place, owner: Owner) -> SinglePools:
    return SinglePools(place.provider(), PoolSpec("inference", 1), owner)


def train_until_replaced(folder: RunFolder, generators: Generators, lose: Callable[[], None]) -> list[str]:
    """Loses generator-1 once both are there; what is said until it is there again."""
    said, ends = [], folder.path / "ends"
    deadline, lived, lost = time.monotonic() + WAIT_S, 0, False

    def check() -> None:
        nonlocal lived, lost
        assert time.monotonic() < deadline, said
        if not lost and lives(folder, 0) and lives(folder, 1):
            lose()
            lost = True
        if numbers(folder) == [2, 1]:
            lived = lives(folder, 1)
        if numbers(folder) == [2, 1, 2] and lives(folder, 1) > lived:
            ends.touch()

    command = ["sh", "-c", f"until [ -e {ends} ]; do sleep 0.1; done"]
    launch = partial(LocalPool(Owner("trainer", folder.logs)).launch, "trainer", command)
    with closing(KeptProcess(launch)) as trainer:
        follow(trainer, generators, said.append, said.append, [check])
    return said


def expected(said: list[str], folder: RunFolder) -> None:
    asked, replaced = (line for line in said if "restart" not in line)
    assert asked.startswith("generator-1 ended with exit code 1; other devices are asked for; still going: 1")
    assert replaced.startswith("generator-1 is replaced on ")
    assert lives(folder, 0) == 1


def all_is_free(place, tmp_path: Path) -> None:
    provider = place.provider()
    place.acquire(provider, [PoolSpec("inference", 4), PoolSpec("training", 4)], Owner("next", tmp_path / "next"))
    provider.release("next")


@pytest.mark.slow
def test_a_lost_lease_in_ray(ray_place, tmp_path: Path, running) -> None:
    folder, gang = RunFolder(tmp_path), ray_place.provider()
    owner, own = Owner("ray-lost", folder.logs), singles(ray_place, Owner("ray-lost", folder.logs))
    try:
        (pool,) = ray_place.acquire(gang, [PoolSpec("inference", 1)], owner)
        alone = acquire(own, "generator-1")
        started = [start(pool, 0, 0), start(alone, 1)]
        begin = partial(ElasticGenerators, folder, started, start, own, Elasticity(2, 2, 1.0), replaces=True)

        def lose() -> None:
            for process in running("hold"):
                with suppress(psutil.NoSuchProcess):  # of another group, which has just ended
                    if any("ray-lost-generator-1" in argument for argument in process.cmdline()):
                        process.kill()

        with closing(begin()) as generators:
            expected(train_until_replaced(folder, generators, lose), folder)
    finally:
        gang.release(owner.name)
    all_is_free(ray_place, tmp_path)


def acquire(pools: SinglePools, role: str) -> Pool:
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            return pools.acquire(role)
        except PoolBusyError:
            assert time.monotonic() < deadline


def test_a_lost_machine_in_slurm(slurm_place, tmp_path: Path) -> None:
    folder, gang = RunFolder(tmp_path), slurm_place.provider()
    owner = Owner("slurm-lost", folder.logs)
    try:
        (pool,) = slurm_place.acquire(gang, [PoolSpec("inference", 6, parts=2)], owner)
        machines = [pool.gpus[0].partition(":")[0], pool.gpus[-1].partition(":")[0]]
        assert machines == sorted(set(machines))  # the job's script runs on the first one
        started = [start(pool, index, index) for index in range(2)]
        own = singles(slurm_place, owner)
        begin = partial(ElasticGenerators, folder, started, start, own, Elasticity(2, 2, 1.0), replaces=True)
        try:
            with closing(begin()) as generators:
                expected(train_until_replaced(folder, generators, partial(tell, machines[1], "down")), folder)
        finally:
            tell(machines[1], "resume")
    finally:
        gang.release(owner.name)
    all_is_free(slurm_place, tmp_path)


def tell(machine: str, state: str) -> None:
    subprocess.run(["scontrol", "update", f"nodename={machine}", f"state={state}", "reason=lost"], check=True)


def test_a_generator_that_cannot_run_anywhere_is_left_out_in_the_end(tmp_path: Path) -> None:
    """Three other places, then no more; and the run fails for it only where it was the last."""
    folder, owner = RunFolder(tmp_path), Owner("fails", tmp_path / "logs")

    def fail(pool: Pool, index: int) -> KeptProcess:
        return KeptProcess(partial(pool.launch, f"generator-{index}", ["sh", "-c", "exit 1"]), restarts=0)

    own = SinglePools(LocalPools((), tmp_path), PoolSpec("inference", 0), owner)
    trainer = KeptProcess(partial(LocalPool(owner).launch, "trainer", ["sleep", "600"]))
    begin = partial(ElasticGenerators, folder, start=fail, pools=own, elasticity=Elasticity(1, 1, 1.0), replaces=True)
    said: list[str] = []
    with closing(begin([fail(LocalPool(owner), 0)])) as generators, closing(trainer):
        with pytest.raises(ProcessFailedError, match="generator-0 ended with exit code 1"):
            follow(trainer, generators, said.append, said.append)
    assert sum("generator-0 is replaced" in line for line in said) == 3
