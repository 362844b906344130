"""The local pool binds what it leased, and leases nothing twice."""

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from infra.files.locks import hold
from infra.pools.base import PoolBusyError, PoolSpec
from infra.pools.local import LocalPools
from infra.processes.control_groups import cores
from infra.processes.process import Owner
from infra.refusal import Refusal

GPUS = ("GPU-aa", "GPU-bb", "GPU-cc", "GPU-dd")
NOBODY = 65534
SHOW = ["sh", "-c", 'echo "$CUDA_VISIBLE_DEVICES|$OMP_NUM_THREADS|$OMP_WAIT_POLICY"']


def shown(pools: LocalPools, folder: Path, gpus: int, **options: int | None) -> str:
    (pool,) = pools.acquire([PoolSpec("inference", gpus)], Owner("run", folder))
    process = pool.launch("show", SHOW, **options)  # pyright: ignore[reportArgumentType]
    process.wait(120)
    pools.release("run")
    return process.log.read_text().splitlines()[-1]


def test_a_cpu_pool_shares_the_cores_and_hides_every_gpu(tmp_path: Path) -> None:
    pools = LocalPools(GPUS, tmp_path / "locks")
    assert shown(pools, tmp_path, 0) == f"|{cores()}|PASSIVE"
    assert shown(pools, tmp_path, 0, processes=2) == f"|{max(1, cores() // 2)}|PASSIVE"
    assert shown(pools, tmp_path, 0, processes=2, threads=5) == "|5|PASSIVE"


def test_two_cpu_pools_of_a_run_divide_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both compute at the same time. A pool with GPUs computes there."""
    monkeypatch.setattr("infra.pools.local.cores", lambda: 8)
    pools = LocalPools(GPUS, tmp_path / "locks")
    for gpus, expected in ((0, ["|4|PASSIVE", "|4|PASSIVE"]), (1, ["GPU-aa|8|PASSIVE", "|8|PASSIVE"])):
        leased = pools.acquire([PoolSpec("inference", gpus), PoolSpec("training", 0)], Owner("run", tmp_path))
        processes = [pool.launch(f"show-{place}", SHOW) for place, pool in enumerate(leased)]
        for process in processes:
            process.wait(120)
        assert [process.log.read_text().splitlines()[-1] for process in processes] == expected
        pools.release("run")


@pytest.mark.parametrize(
    ("gpus", "processes", "index", "expected"),
    [
        (2, 2, None, "GPU-aa,GPU-bb"),
        (2, 2, 1, "GPU-bb"),
        (4, 2, 0, "GPU-aa,GPU-bb"),  # neighbours, which have NVLink bridges and the NUMA node in common
        (4, 2, 1, "GPU-cc,GPU-dd"),
        (1, 3, 2, "GPU-aa"),
        (2, 4, 2, "GPU-bb"),
    ],
)
def test_gpus_are_bound(tmp_path: Path, gpus: int, processes: int, index: int | None, expected: str) -> None:
    pools = LocalPools(GPUS, tmp_path / "locks")
    assert shown(pools, tmp_path, gpus, processes=processes, index=index).startswith(f"{expected}|")


def test_what_can_never_fit_is_refused_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"training pool wants 5 GPUs and this machine has 4: lower pools\.training_gpus"
    ):
        LocalPools(GPUS, tmp_path).acquire([PoolSpec("training", 5)], Owner("run", tmp_path))


def test_two_runs_never_share_a_gpu(tmp_path: Path) -> None:
    first, second = (LocalPools(GPUS, tmp_path / "locks") for _ in range(2))
    (one,) = first.acquire([PoolSpec("inference", 3)], Owner("one", tmp_path))
    with pytest.raises(PoolBusyError, match="wants 2 GPUs; of this machine's 4, 3 are held"):
        second.acquire([PoolSpec("training", 2)], Owner("two", tmp_path))
    (two,) = second.acquire([PoolSpec("training", 1)], Owner("two", tmp_path))
    assert set(one.gpus).isdisjoint(two.gpus)
    first.release("one")
    first.release("one")
    second.release("two")
    (all_of_them,) = first.acquire([PoolSpec("inference", 4)], Owner("one", tmp_path))
    assert all_of_them.gpus == GPUS
    first.release("one")


def test_pools_of_several_roles_come_together_or_not_at_all(tmp_path: Path) -> None:
    first, second = (LocalPools(GPUS, tmp_path / "locks") for _ in range(2))
    specs = [PoolSpec("inference", 1), PoolSpec("training", 2)]
    inference, training = first.acquire(specs, Owner("one", tmp_path))
    assert (inference.gpus, training.gpus) == (GPUS[:1], GPUS[1:3])
    with pytest.raises(PoolBusyError, match="inference pool wants 1 GPUs and the training pool wants 2 GPUs; of this"):
        second.acquire(specs, Owner("two", tmp_path))
    (left,) = second.acquire([PoolSpec("training", 1)], Owner("two", tmp_path))
    assert left.gpus == GPUS[3:]
    first.release("one")
    second.release("two")


def test_release_stops_what_was_started(tmp_path: Path) -> None:
    pools = LocalPools(GPUS, tmp_path / "locks")
    (pool,) = pools.acquire([PoolSpec("inference", 1)], Owner("run", tmp_path))
    process = pool.launch("sleeper", ["sleep", "600"])
    pools.release("run")
    assert not psutil.pid_exists(process.pid)


def test_users_of_one_machine_share_its_locks(public_folder: Path) -> None:
    """A second user, where tests may become one; else another process of the same user, and the modes decide."""
    locks = public_folder / "locks"
    public_folder.chmod(0o1777)
    first = LocalPools(GPUS[:2], locks)
    first.acquire([PoolSpec("training", 1)], Owner("one", public_folder))
    assert as_another_user(locks) == GPUS[1]
    first.release("one")
    assert as_another_user(locks) == GPUS[0]
    for file in locks.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o666
    assert stat.S_IMODE(locks.stat().st_mode) == 0o1777


def test_users_with_temporary_folders_of_their_own_share_the_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = f"GPU-{uuid4()}"
    first = LocalPools((gpu,))
    first.acquire([PoolSpec("training", 1)], Owner("one", tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # as $TMPDIR sets it
    with pytest.raises(PoolBusyError):
        LocalPools((gpu,)).acquire([PoolSpec("training", 1)], Owner("two", tmp_path))
    first.release("one")
    Path(f"/tmp/draftsmith-gpus/{gpu}.lock").unlink()


def as_another_user(locks: Path) -> str:
    """The GPU that a process of nobody's is given."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.getuid() == 0:
                os.setgroups([])
                os.setgid(NOBODY)
                os.setuid(NOBODY)
            (pool,) = LocalPools(GPUS[:2], locks).acquire([PoolSpec("training", 1)], Owner("two", locks))
            os.write(write, pool.gpus[0].encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as answer:
        return answer.read()


def test_a_lock_that_another_user_keeps_to_itself_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "locks").symlink_to(tmp_path)
    with pytest.raises(Refusal, match=r"the lock of GPU-aa cannot be taken .*mode 1777"):
        LocalPools(GPUS, tmp_path / "locks").acquire([PoolSpec("training", 1)], Owner("run", tmp_path))


STARTER = """
import sys, time
from functools import partial
from pathlib import Path
from infra.pools import local
from infra.pools.base import PoolSpec
from infra.pools.local import LocalPools
from infra.processes.process import Owner
local.LocalCommand = partial(local.LocalCommand, grace_s=600.0)  # so that the test alone decides when it ends
folder = Path(sys.argv[1])
pools = LocalPools(("GPU-aa",), folder / "locks")
(pool,) = pools.acquire([PoolSpec("training", 1)], Owner("run", folder))
script = f"trap 'while [ ! -e {folder}/go ]; do sleep 0.05; done; exit' TERM; echo up; while :; do sleep 0.05; done"
process = pool.launch("slow-to-end", ["sh", "-c", script])
while not process.new_lines():
    time.sleep(0.05)
print("up", flush=True)
time.sleep(600)
"""


def test_a_gpu_stays_locked_until_a_killed_starters_processes_are_gone(tmp_path: Path) -> None:
    pools = LocalPools(("GPU-aa",), tmp_path / "locks")
    command = [sys.executable, "-c", STARTER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == "up\n"
        starter.kill()
    with pytest.raises(PoolBusyError):
        pools.acquire([PoolSpec("training", 1)], Owner("next", tmp_path))
    (tmp_path / "go").touch()
    with hold(tmp_path / "locks" / "GPU-aa.lock", wait_s=120):
        pass
    (pool,) = pools.acquire([PoolSpec("training", 1)], Owner("next", tmp_path))
    assert pool.gpus == ("GPU-aa",)
    pools.release("next")
