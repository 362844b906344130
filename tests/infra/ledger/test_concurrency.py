import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest

from infra.ledger.generators import Exchange
from infra.ledger.ledger import Ledger
from infra.ledger.schema import samples
from infra.ledger.trainers import Wait, plan_step, resume_run
from infra.records.data_path import CheckpointRecord, Lease, SampleSlot, StepPlan

SAMPLES = 40
SLOTS = [SampleSlot(ordinal=i, sample=1000 + i, tokens=1 + i * 7 % 5) for i in range(SAMPLES)]


def test_many_may_make_a_ledger_at_once(tmp_path: Path) -> None:
    for number in range(20):
        start = threading.Barrier(8)

        def make(url: str = f"sqlite:///{tmp_path}/{number}.sqlite", start: threading.Barrier = start) -> None:
            start.wait(120)
            Ledger.open(url, "run").close()

        with ThreadPoolExecutor(8) as threads:
            for made in [threads.submit(make) for _ in range(8)]:
                made.result(240)


@contextmanager
def generators(url: str, folder: Path, count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    script = str(Path(__file__).with_name("generator_process.py"))
    started = [subprocess.Popen([sys.executable, script, url, str(folder), f"g{i}"]) for i in range(count)]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()


def next_step(ledger: Ledger, incarnation: int, epoch: int, step: int):
    deadline = time.monotonic() + 240
    while isinstance(
        answer := plan_step(ledger, incarnation, epoch, step, ranks=2, micro_batches=2, samples_per_step=4), Wait
    ):
        assert time.monotonic() < deadline, answer
        time.sleep(0.005)
    return answer


def train_epoch(ledger: Ledger, incarnation: int, epoch: int, step: int, trained: Counter[tuple[int, int]]) -> int:
    """Train until the epoch ends, copying out and releasing every object; the last step."""
    while isinstance(plan := next_step(ledger, incarnation, epoch, step + 1), StepPlan):
        step = plan.step
        for sample in plan.samples:
            file = Path(sample.object.location)
            assert file.read_text() == str(sample.sample)
            file.unlink()
            ledger.release(incarnation, epoch, sample.ordinal)
            trained[epoch, sample.ordinal] += 1
        if step % 3 == 0:
            ledger.commit(
                incarnation,
                CheckpointRecord(step=step, path=str(step), manifest_hash="", incarnation=incarnation),
            )
    return step


@pytest.mark.parametrize("order", ["strict", "any"])
def test_generator_processes_of_which_one_is_killed(url: str, tmp_path: Path, order: Literal["strict", "any"]) -> None:
    folder = tmp_path / "objects"
    folder.mkdir()
    trained: Counter[tuple[int, int]] = Counter()
    with Ledger.open(url, "run") as ledger:
        ledger.create_run(budget_bytes=250, bytes_per_token=10, lease_seconds=1, max_attempts=3, order=order)
        ledger.open_epoch(None, 0, SLOTS)
        ledger.lease("never heard of again", 3)
        incarnation = resume_run(ledger, lambda _: True, lambda _: True).incarnation
        with generators(url, folder, 3) as processes:
            step = train_epoch(ledger, incarnation, 0, 0, trained)
            processes[0].kill()
            ledger.open_epoch(incarnation, 1, SLOTS)
            step = train_epoch(ledger, incarnation, 1, step, trained)
            last = CheckpointRecord(step=step, path="last", manifest_hash="", incarnation=incarnation)
            ledger.commit(incarnation, last)
            ledger.finish(incarnation)
            assert [process.wait(240) for process in processes[1:]] == [0, 0]
        assert trained == Counter((epoch, slot.ordinal) for epoch in range(2) for slot in SLOTS)
        assert ledger.progress().consumed == 2 * SAMPLES
        assert ledger.progress().attempts <= len(range(3, SAMPLES, 7))
        assert ledger.held_keys() == set()


def test_threads_never_exceed_the_budget_nor_share_a_sample(url: str) -> None:
    """Many processes open, create and lease at once; every lease is given out once and the sum fits."""
    values = {"budget_bytes": 600, "bytes_per_token": 10, "lease_seconds": 3600, "max_attempts": 3}
    start = threading.Barrier(6)
    leased: list[Lease] = []
    ended: list[str] = []

    def lease(owner: str) -> None:
        start.wait(120)
        with Ledger.open(url, "run") as ledger:
            ledger.create_run(**values, order="strict")
            ledger.open_epoch(None, 0, SLOTS)
            while leases := ledger.lease(owner, 2):
                leased.extend(leases)
        ended.append(owner)

    threads = [threading.Thread(target=lease, args=(f"t{i}",)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
    assert len(ended) == len(threads)
    assert sorted(lease.ordinal for lease in leased) == list(range(len(leased)))
    with Ledger.open(url, "run") as ledger:
        held = ledger.progress().bytes_held
    assert held == sum(lease.nbytes for lease in leased) <= 600
    assert held + SLOTS[len(leased)].tokens * 10 > 600, "the budget was used as far as it goes"


KILLED_WHILE_IT_PUBLISHES = """
import os, signal, sys
import sqlalchemy as sa
from infra.ledger.generators import Publication
from infra.ledger.generators import Exchange
from infra.ledger.ledger import Ledger
from infra.records.data_path import BufferRecord, ObjectRecord

def kill_before_the_commit(_connection, _cursor, statement, *_):
    if statement.startswith("UPDATE samples"):
        os.kill(os.getpid(), signal.SIGKILL)

publications = []
ledger = Ledger.open(sys.argv[1], "run")
for lease in ledger.lease("killed", 3):
    buffer = BufferRecord(name="aux", nbytes=lease.nbytes, xxh3="")
    record = ObjectRecord(key=ledger.key(lease), location="", buffers=(buffer,))
    publications.append(Publication(lease, record))
sa.event.listen(ledger._engine, "after_cursor_execute", kill_before_the_commit)
ledger.publish(*publications)
"""


def test_a_generator_that_is_killed_while_it_publishes_has_published_nothing(url: str) -> None:
    with Ledger.open(url, "run") as ledger:
        ledger.create_run(budget_bytes=1000, bytes_per_token=1, lease_seconds=600, max_attempts=2, order="strict")
        ledger.open_epoch(None, 0, SLOTS)
        ended = subprocess.run([sys.executable, "-c", KILLED_WHILE_IT_PUBLISHES, url], timeout=240, check=False)
        assert ended.returncode == -signal.SIGKILL
        assert (ledger.progress().leased, ledger.progress().ready) == (3, 0)
        assert ledger.give_back("killed") == 3
        assert [lease.ordinal for lease in ledger.lease("next", 3)] == [0, 1, 2]


def test_whoever_has_to_wait_does_not_queue_for_the_run(url: str) -> None:
    with Ledger.open(url, "run") as ledger, Ledger.open(url, "run") as other, ThreadPoolExecutor(1) as thread:
        ledger.create_run(budget_bytes=1000, bytes_per_token=1, lease_seconds=600, max_attempts=2, order="strict")
        ledger.open_epoch(None, 0, SLOTS)
        incarnation = resume_run(ledger, lambda _: True, lambda _: True).incarnation
        ledger.lease("a", SAMPLES)

        def ask() -> tuple[object, Exchange]:
            planned = plan_step(ledger, incarnation, 0, 1, ranks=1, micro_batches=1, samples_per_step=4)
            return planned, ledger.exchange("b", (), 4, has_others=True)

        assert isinstance(ask()[0], Wait), "the first time it says which step is trained"
        with other.write():
            waits, nothing = thread.submit(ask).result(60)
        assert isinstance(waits, Wait)
        assert nothing == Exchange([], [], finished=False)


def test_a_reader_sees_one_moment(url: str) -> None:
    with Ledger.open(url, "run") as ledger, Ledger.open(url, "run") as other:
        ledger.create_run(budget_bytes=1000, bytes_per_token=1, lease_seconds=600, max_attempts=2, order="strict")
        ledger.open_epoch(None, 0, SLOTS)
        with ledger.read() as rows:
            before = rows.scalar(rows.first("pending", samples.c.ordinal, limit=1))
            assert other.lease("g", 3)
            assert rows.scalar(rows.first("pending", samples.c.ordinal, limit=1)) == before == 0
