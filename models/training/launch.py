"""Runs the trainer's ranks as processes of this machine and ends with the status of the first one that fails.

`python -m models.training.launch RUN --ranks N`. The ranks find each other through a file without a name that they
inherit, and gloo and NCCL listen on loopback alone: nothing outside this machine can talk to a rank. (torchrun's agent
serves its rendezvous on every interface, without authentication, and unpickles what it is sent.) Where ranks run on
several machines, each has a launcher, told by `--machine`; they meet in the run folder (infra.data_plane.meeting).
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from infra.data_plane.meeting import ALONE, MetMachine, meet
from infra.files.run_folder import RunFolder
from infra.pools.binding import near_cores
from infra.processes.exit import run_main
from infra.run.gpu_use import measured_use
from infra.settings import leased_gpus, meeting_environment, rank_environment

GRACE_S = 5.0
"""Between SIGTERM and SIGKILL for the ranks that are left."""


def run_ranks(command: Sequence[str], ranks: int, machine: MetMachine = ALONE) -> int:
    """Run `command` once per rank of this machine; return 0 when all have ended well, else the first other status.

    The status is 128 + n after signal n. A failed rank, or a signal to this process, stops all ranks.
    """
    store = os.memfd_create("ranks")
    started: list[subprocess.Popen[bytes]] = []
    try:
        met = meeting_environment(machine.store or f"/proc/self/fd/{store}", machine.interface)
        for rank in range(ranks):
            place = rank_environment(rank, ranks, machine.index, machine.machines)
            with _near_its_gpu(rank):
                started.append(subprocess.Popen(command, env={**os.environ, **place, **met}, pass_fds=[store]))
        return _first_failure(started)
    finally:
        _stop(started)
        os.close(store)


@contextmanager
def _near_its_gpu(rank: int) -> Iterator[None]:
    """What is started meanwhile has the cores on the NUMA node of the rank's GPU, and takes memory there."""
    gpus, cores = leased_gpus(), os.sched_getaffinity(0)
    if gpus:
        os.sched_setaffinity(0, near_cores(gpus[rank % len(gpus)]))
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _first_failure(ranks: Sequence[subprocess.Popen[bytes]]) -> int:
    running = {rank.pid: rank for rank in ranks}
    while running:
        # Without reaping, which is left to subprocess: it would take a child that is gone for one that ended well.
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        status = running.pop(ended.si_pid).wait()
        if status:
            return status if status > 0 else 128 - status
    return 0


def _stop(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        rank.terminate()
    deadline = time.monotonic() + GRACE_S
    for rank in ranks:
        try:
            rank.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.kill()
            rank.wait()


def stop_on_signals() -> None:
    """Let SIGTERM and SIGINT end this process by SystemExit, so that it stops its ranks on the way out."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)


def _end(number: int, _frame: FrameType | None) -> None:
    for again in (signal.SIGTERM, signal.SIGINT):
        signal.signal(again, signal.SIG_IGN)  # stopping the ranks must not be interrupted
    raise SystemExit(128 + number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--ranks", type=int, default=1, help="ranks on this machine")
    parser.add_argument("--machine", nargs=4, metavar=("INDEX", "MACHINES", "MEETING", "ADDRESS"))
    options = parser.parse_args()
    stop_on_signals()
    machine = ALONE
    if options.machine:
        index, machines, meeting, address = options.machine
        machine = meet(Path(meeting), address, int(index), int(machines))
    trainer = [sys.executable, "-m", "models.training.trainer", str(options.run), "--parent", str(os.getpid())]
    with measured_use(RunFolder(options.run), "training"):
        status = run_ranks(trainer, options.ranks, machine)
    raise SystemExit(status)


if __name__ == "__main__":
    run_main(main)
