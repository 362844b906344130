"""Emulated generators and trainer ranks of `ledger.py`: they ask the ledger for all it gives, and move no bytes.

Apart, since thirty-two of them start at once: what they import is what they need.
"""

import json
import os
import sys
import time
from multiprocessing import Pipe, Process
from multiprocessing.connection import Connection
from pathlib import Path

from infra.files.atomic import write_atomically
from infra.ledger.generators import Publication
from infra.ledger.ledger import Ledger
from infra.ledger.trainers import Wait, plan_step, resume_run
from infra.records.data_path import BufferRecord, CheckpointRecord, Lease, ObjectRecord, StepPlan

RUN = "benchmark"
TOKENS = 550
BYTES_PER_TOKEN = 32 * 2**10
RANKS, CHECKPOINT_STEPS, LEASED = 8, 25, 8
SAMPLES_PER_STEP = 8 * RANKS
IDLE_S, POLL_S, WAIT_S = (0.05, 0.4), 0.02, 600.0


def publication(ledger: Ledger, lease: Lease) -> Publication:
    buffers = tuple(BufferRecord(name=name, nbytes=lease.nbytes // 2, xxh3="0" * 16) for name in ("aux", "last"))
    return Publication(lease, ObjectRecord(key=ledger.key(lease), location="memory", buffers=buffers), 0.1, 0.01)


def generate(url: str, ready: Path, leased: int) -> None:
    """One generator whose captures take no time: it asks for as much as the ledger gives.

    `ready` is a file that it makes when it is there; its name is the generator's.
    """
    owner = ready.name
    with Ledger.open(url, RUN) as ledger:
        ledger.give_back(owner)
        ready.touch()
        leases, finished, idle_s = list[Lease](), False, IDLE_S[0]
        while not finished:
            captured = [publication(ledger, lease) for lease in leases]
            _, leases, finished = ledger.exchange(owner, captured, leased, has_others=True)
            if leases:
                idle_s = IDLE_S[0]
            else:
                time.sleep(idle_s)
                idle_s = min(2 * idle_s, IDLE_S[1])


def rank(orders: Connection) -> None:
    """A trainer rank other than 0: it hears of a plan, and says that it has copied its samples out.

    It ends with rank 0, also with a killed one, whose end of the pipe other ranks hold open.
    """
    trainer = os.getppid()
    while True:
        while not orders.poll(1.0):
            if os.getppid() != trainer:
                return
        if not (text := orders.recv_bytes()):
            return
        plan = StepPlan.model_validate_json(text)
        orders.send_bytes(str(len(plan.samples)).encode())


def train(url: str, folder: Path, samples: int) -> None:
    """All ranks; a file beside each checkpoint names what its weights have seen."""
    pipes = [Pipe() for _ in range(RANKS - 1)]
    others = [Process(target=rank, args=(theirs,), daemon=True) for _, theirs in pipes]
    for process in others:
        process.start()
    with Ledger.open(url, RUN) as ledger:
        resumed = resume_run(ledger, lambda record: Path(record.path).is_file(), lambda _: True)
        incarnation, step, seen = resumed.incarnation, 0, list[int]()
        if resumed.checkpoint:
            step, seen = resumed.checkpoint.step, json.loads(Path(resumed.checkpoint.path).read_text())
        while len(seen) < samples:
            plan = next_plan(ledger, incarnation, step + 1)
            text = plan.model_dump_json().encode()
            for mine, _ in pipes:
                mine.send_bytes(text)
            assert all(mine.recv_bytes() for mine, _ in pipes)
            ledger.release(incarnation, 0, *(sample.ordinal for sample in plan.samples))
            seen += [sample.ordinal for sample in plan.samples]
            step = plan.step
            if step % CHECKPOINT_STEPS == 0 or len(seen) == samples:
                path = folder / f"{incarnation}-{step}.json"
                write_atomically(path, json.dumps(seen))
                record = CheckpointRecord(step=step, path=str(path), manifest_hash="", incarnation=incarnation)
                ledger.commit(incarnation, record)
        ledger.finish(incarnation)
    for mine, _ in pipes:
        mine.send_bytes(b"")


def next_plan(ledger: Ledger, incarnation: int, step: int) -> StepPlan:
    deadline, size = time.monotonic() + WAIT_S, SAMPLES_PER_STEP
    while isinstance(
        plan := plan_step(ledger, incarnation, 0, step, ranks=RANKS, micro_batches=1, samples_per_step=size), Wait
    ):
        assert time.monotonic() < deadline, plan
        time.sleep(POLL_S)
    assert isinstance(plan, StepPlan), plan
    return plan


if __name__ == "__main__":
    what, address, where, *rest = sys.argv[1:]
    if what == "generate":
        generate(address, Path(where), int(rest[0]))
    else:
        train(address, Path(where), int(rest[0]))
