"""What every provider of pools promises, on the real thing: this machine, a Ray cluster, a Slurm cluster."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from infra.pools.base import PoolBusyError, PoolSpec
from infra.processes.process import Owner, ProcessFailedError

SHOW = ["sh", "-c", 'echo "gpus=$CUDA_VISIBLE_DEVICES threads=$OMP_NUM_THREADS at $PWD with $DRAFTSMITH_CACHE"']
GANG = [PoolSpec("inference", 2), PoolSpec("training", 2)]
ENDED_S = 240.0
"""Of a command that ends by itself: on a cluster several processes are started for it."""


def test_two_leases_never_share_a_gpu(place, tmp_path: Path) -> None:
    first, second = place.provider(), place.provider()
    try:
        (one,) = place.acquire(first, [PoolSpec("inference", 2)], Owner("one", tmp_path / "one"))
        (two,) = place.acquire(second, [PoolSpec("training", 2)], Owner("two", tmp_path / "two"))
        assert len({*one.gpus, *two.gpus}) == 4
        for pool in (one, two):
            process = pool.launch("show", SHOW)
            process.wait(ENDED_S)
            seen = process.log.read_text().split("gpus=")[1].split(" ")[0]
            assert [gpu.rpartition(":")[2] for gpu in pool.gpus] == seen.split(",")
    finally:
        first.release("one")
        second.release("two")


def test_a_gang_comes_together_or_not_at_all(place, tmp_path: Path) -> None:
    first, second = place.provider(), place.provider()
    everything = [PoolSpec("inference", 4 * (place.machines - 1)), PoolSpec("training", 3)]
    everything = everything[-1:] if place.machines == 1 else everything
    one, two = Owner("one", tmp_path / "one"), Owner("two", tmp_path / "two")
    try:
        place.acquire(first, everything, one)
        with pytest.raises(PoolBusyError, match="inference pool wants 1 GPUs and the training pool wants 2 GPUs; "):
            second.acquire([PoolSpec("inference", 1), PoolSpec("training", 2)], two)
        # The one that was left is nobody's: a smaller lease gets it, unless the engine lets nobody overtake.
        first.release("one")
        inference, training = place.acquire(second, [PoolSpec("inference", 1), PoolSpec("training", 2)], two)
        assert (len(inference.gpus), len(training.gpus)) == (1, 2)
    finally:
        first.release("one")
        second.release("two")


def test_what_can_never_fit_is_refused_at_once_with_the_numbers(place, tmp_path: Path) -> None:
    provider = place.provider()
    for specs, said in (
        ([PoolSpec("training", 5)], r"training pool wants 5 GPUs.* 4.*pools\.training_gpus"),
        ([PoolSpec("inference", 3), PoolSpec("training", 4), PoolSpec("inference", 3)], r"3 GPUs|10 GPUs"),
    ):
        with pytest.raises(ValueError, match=said):
            place.acquire(provider, specs, Owner("never", tmp_path))
        provider.release("never")


def test_a_pool_without_gpus_hides_them_and_shares_its_cores(place, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", "/some/cache")
    monkeypatch.chdir(tmp_path)
    provider = place.provider()
    try:
        (pool,) = place.acquire(provider, [PoolSpec("inference", 0, parts=2)], Owner("cpu", tmp_path))
        assert pool.gpus == ()
        process = pool.launch("show", SHOW, threads=3, processes=2, index=1)
        process.wait(ENDED_S)
        assert f"gpus= threads=3 at {tmp_path} with /some/cache" in process.log.read_text().splitlines()
    finally:
        provider.release("cpu")


def test_output_and_exit_status_come_back(place, tmp_path: Path) -> None:
    provider = place.provider()
    try:
        (pool,) = place.acquire(provider, [PoolSpec("training", 1)], Owner("status", tmp_path))
        # The largest output that must not get stuck in a pipe, and a last line without its end.
        process = pool.launch("talks", ["sh", "-c", "seq 1 20000; printf last; echo worse >&2; exit 7"])
        with pytest.raises(ProcessFailedError, match="exit code 7") as raised:
            process.wait(ENDED_S)
        assert raised.value.tail[-2:] == ["20000", "lastworse"]
        refused = pool.launch("refused", ["sh", "-c", "echo 'error: mend it' >&2; exit 2"])
        with pytest.raises(ValueError, match=r"^mend it$"):
            refused.wait(ENDED_S)
        killed = pool.launch("killed", ["sh", "-c", "kill -9 $$"])
        with pytest.raises(ProcessFailedError, match="killed by signal 9"):
            killed.wait(ENDED_S)
    finally:
        provider.release("status")


HIDES = """
trap 'echo asked to stop; exit 0' TERM
setsid sh -c 'trap "" TERM; sleep {mark} & wait; sleep {mark}' &
echo up
while :; do sleep 0.1; done
"""


def hides(mark: str) -> list[str]:
    """A command that leaves a process in a session of its own, which does not listen."""
    return ["sh", "-c", HIDES.format(mark=mark)]


@pytest.fixture
def mark() -> str:
    """Seconds to sleep that nobody else sleeps."""
    return f"{600 + time.time_ns() % 100_000_000 / 1e8:.8f}"


def test_stopping_ends_everything_that_was_started(place, tmp_path: Path, mark: str, wait_until, running) -> None:
    provider = place.provider()
    try:
        (pool,) = place.acquire(provider, [PoolSpec("training", 1)], Owner("stop", tmp_path))
        process = pool.launch("hides", hides(mark))
        wait_until(lambda: "up" in process.log.read_text().split() and bool(running(mark)), "it never came up")
        process.stop()
        assert "asked to stop" in process.log.read_text()
        wait_until(lambda: not running(mark), "something is left")
        again = pool.launch("show", SHOW)
        again.wait(ENDED_S)
    finally:
        provider.release("stop")


STARTER = """
import sys, time
from pathlib import Path
from infra.pools.base import PoolBusyError, PoolSpec
from infra.processes.process import Owner
{code}
pools = ()
while not pools:
    try:
        pools = provider.acquire([PoolSpec("training", 4)], Owner("dies", Path(sys.argv[1])))
    except PoolBusyError as error:
        print(error, file=sys.stderr)
process = pools[0].launch("hides", {command!r})
while "up" not in process.new_lines():
    process.check()
    time.sleep(0.05)
print("up", flush=True)
time.sleep(600)
"""


def start_elsewhere(place, command: list[str], folder: Path) -> "subprocess.Popen[str]":
    script = STARTER.format(code=place.code, command=command)
    starter = subprocess.Popen(
        [sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert starter.stdout is not None
    assert starter.stdout.readline() == "up\n"
    return starter


def test_nothing_outlives_a_killed_starter(place, tmp_path: Path, mark: str, wait_until, running) -> None:
    with start_elsewhere(place, hides(mark), tmp_path) as starter:
        drivers = psutil.Process(starter.pid).children(recursive=True)
        starter.kill()
    wait_until(lambda: not running(mark), "the command is left")
    wait_until(lambda: not any(one.is_running() for one in drivers), "a process that drove it is left")
    provider = place.provider()
    try:
        needed = [PoolSpec("inference", 4 * (place.machines - 1)), PoolSpec("training", 4)][2 - place.machines :]
        pools = place.acquire(provider, needed, Owner("next", tmp_path / "next"))
        assert sum(len(pool.gpus) for pool in pools) == 4 * place.machines
    finally:
        provider.release("next")


def test_releasing_twice_is_fine(place, tmp_path: Path, mark: str, wait_until, running) -> None:
    provider = place.provider()
    (pool,) = place.acquire(provider, [PoolSpec("training", 4)], Owner("twice", tmp_path))
    pool.launch("hides", hides(mark))
    wait_until(lambda: bool(running(mark)), "it never came up")
    provider.release("twice")
    wait_until(lambda: not running(mark), "something is left")
    provider.release("twice")
    (pool,) = place.acquire(provider, [PoolSpec("training", 4)], Owner("twice", tmp_path))
    assert len(pool.gpus) == 4
    provider.release("twice")


@pytest.mark.parametrize("place", ["ray", "slurm"], indirect=True)  # a local lease is a lock of its process
def test_any_process_may_release_what_another_holds(place, tmp_path: Path, mark: str, wait_until, running) -> None:
    with start_elsewhere(place, hides(mark), tmp_path) as starter:
        try:
            place.provider().release("dies")
            wait_until(lambda: not running(mark), "the command is left")
        finally:
            starter.kill()
    provider = place.provider()
    place.acquire(provider, [PoolSpec("training", 4)], Owner("next", tmp_path / "next"))
    provider.release("next")
