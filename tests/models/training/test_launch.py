"""The trainer's ranks: whom they listen to, and how they end. Real processes, gloo."""

import ipaddress
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from infra.data_plane.start import start_trainer
from infra.files.run_folder import RunFolder
from infra.pools.local import LocalPool
from infra.processes.process import Owner, ProcessRefusedError
from infra.records.data_path import SampleProgress
from models.run import PreparedRun

WAIT_S = 300.0
SMALL = [
    "data.max_samples=36",
    "data.max_tokens=64",
    "training.samples_per_step=4",
    "training.log_steps=1",
    "training.ranks=2",
]
LAUNCH = """
import sys
from models.training.launch import run_ranks, stop_on_signals
stop_on_signals()
sys.exit(run_ranks(sys.argv[1:], 3))
"""
Address = tuple[str, int]


class Forged:
    """Pickled, it makes whoever unpickles it create a file."""

    def __init__(self, file: Path):
        self._file = file

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, ...]]:
        return os.system, (f"touch {self._file}",)


def listening(process: psutil.Process) -> set[Address]:
    """Addresses at which a process or one below it accepts connections."""
    found: set[Address] = set()
    for one in (process, *process.children(recursive=True)):
        try:
            opened = one.net_connections("inet")
        except psutil.Error:  # it has ended
            continue
        found |= {(at.laddr.ip, at.laddr.port) for at in opened if at.status == psutil.CONN_LISTEN}
    return found


def attack(address: Address, forged: bytes) -> None:
    """Hand a pickle to whatever listens there: as a value of a store of torch's, and as it is."""
    try:
        store = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=1), wait_for_workers=False)
        for key in store.list_keys():
            store.set(key, b64encode(forged).decode())
    except (dist.DistError, RuntimeError):  # nothing of torch's, or it hung up
        pass
    try:
        with socket.create_connection(address, timeout=2) as connection:
            connection.sendall(forged)
    except OSError:  # it has ended
        pass


@pytest.mark.timeout(900)
def test_ranks_listen_on_loopback_alone_and_execute_nothing_that_they_are_sent(
    make_run: Callable[..., RunFolder], start: Callable[..., Any], tmp_path: Path, without_twins: None
) -> None:
    folder, executed = make_run("two", *SMALL), tmp_path / "executed"
    generator = start("models.capture.generator", folder)
    trainer = start("models.training.launch", folder, ranks=2)
    process, seen = psutil.Process(trainer.pid), set[Address]()
    deadline = time.monotonic() + WAIT_S
    while trainer.poll() is None and time.monotonic() < deadline:
        new = listening(process) - seen
        for address in new:
            attack(address, pickle.dumps(Forged(executed)))
        seen |= new
        time.sleep(0.05)
    assert seen, "the ranks connect with each other through gloo"
    assert not executed.exists()
    assert {ip for ip, _ in seen if not ipaddress.ip_address(ip).is_loopback} == set()
    for one in (trainer, generator):
        output, _ = one.communicate(timeout=WAIT_S)
        assert one.returncode == 0, output
    assert PreparedRun.open(folder.path).open_ledger().progress() == SampleProgress(consumed=36)


def test_a_trainer_with_a_damaged_record_refuses_it_by_name(make_run: Callable[..., RunFolder]) -> None:
    """Starting it again would not mend the file."""
    folder = make_run("damaged", *SMALL)
    folder.samples.write_text(folder.samples.read_text()[:-20])
    events: list[str] = []
    with closing(start_trainer(LocalPool(Owner("damaged", folder.logs)), folder, 1, 1)) as trainer:
        deadline = time.monotonic() + WAIT_S
        while trainer.failure is None and time.monotonic() < deadline:
            trainer.tend(print, events.append)
            time.sleep(0.1)
        assert isinstance(trainer.failure, ProcessRefusedError)
        assert f"{folder.samples} is damaged" in str(trainer.failure)
    assert events == []


@pytest.mark.parametrize(
    ("failing", "status"),
    [("sys.exit(2)", 2), ("sys.exit(7)", 7), ("os.kill(os.getpid(), signal.SIGKILL)", 137)],
)
def test_the_first_rank_that_fails_ends_the_others_with_its_status(failing: str, status: int) -> None:
    with launched(f"if rank == 1: sys.stdin.readline(); {failing}") as (process, ranks):
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.wait(WAIT_S) == status
        assert not [pid for pid in ranks if psutil.pid_exists(pid)]


@pytest.mark.parametrize("handler", ["SIG_DFL", "SIG_IGN"])
def test_a_launcher_that_is_told_to_stop_stops_its_ranks(handler: str) -> None:
    with launched("", f"signal.signal(signal.SIGTERM, signal.{handler})") as (process, ranks):
        process.terminate()
        assert process.wait(WAIT_S) == 128 + signal.SIGTERM
        assert not [pid for pid in ranks if psutil.pid_exists(pid)]


def test_ranks_that_all_end_well_end_the_launcher_well() -> None:
    with launched("sys.exit(0)") as (process, _):
        assert process.wait(WAIT_S) == 0


@contextmanager
def launched(then: str, first: str = "") -> Iterator[tuple["subprocess.Popen[str]", list[int]]]:
    """The launcher, and the process ids of its three ranks, which do `first`, report, do `then`, and stay."""
    setup = "import os, signal, sys, time; rank = int(os.environ['RANK'])"
    script = "\n".join((setup, first, "os.write(1, b'%d\\n' % os.getpid())", then, "time.sleep(600)"))
    command = [sys.executable, "-c", LAUNCH, sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process, [int(process.stdout.readline()) for _ in range(3)]
        finally:
            process.kill()
