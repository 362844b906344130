"""The processes of `rehearsal.py`: the product's generators with an emulated engine, and emulated trainer ranks.

    rehearsal_processes.py generate RUN FIRST COUNT RATE    generators FIRST, FIRST + 1, ..., each in threads of its own
    rehearsal_processes.py train RUN RATE PREFETCH          rank 0, and the processes that read for all ranks

`RATE`: samples per second of one generator, or of the whole training.
"""

import json
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe, Process
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from infra.files.run_folder import RunFolder
from infra.ledger.trainers import EndOfEpoch, Wait, plan_step, resume_run
from infra.records.data_path import CheckpointRecord, StepPlan
from infra.transport.base import Transport
from infra.transport.mooncake import client, transport
from models.capture.engine import Captured
from models.capture.generator import Generator
from models.run import PreparedRun

READERS = 4
"""Processes that read for all ranks."""
PIECE = 96 * 2**10
"""A real sample of 550 tokens has five pieces; so has one of these."""
POLL_S, CHECKPOINT_STEPS = 0.02, 10


def use_small_pieces() -> None:
    client.PIECE = transport.PIECE = PIECE
    client.GRAIN = 2**20  # many generators put at the same time in one process here


class EmulatedEngine:
    """Captures as fast as the plan says, one sample after the other, and puts bytes of the right size."""

    in_flight, waits = 32, False

    def __init__(self, run: PreparedRun, rate: float):
        self._transport, self._layout, self._each_s = run.open_transport(), run.layout, 1 / rate
        self._lock, self._free_at = threading.Lock(), 0.0
        longest = run.samples.longest
        self._hidden = self._layout.empty(longest)
        for tensor in self._hidden.named().values():
            tensor.view(torch.uint8).random_()

    def capture(self, key: str, tokens: Tensor, images: Sequence[Path] = ()) -> Captured:
        with self._lock:
            now = time.perf_counter()
            self._free_at = max(now, self._free_at) + self._each_s
            wait_s = self._free_at - now
        time.sleep(wait_s)
        begun = time.perf_counter()
        record = self._transport.put(key, self._layout.views(self._hidden.rows(slice(0, len(tokens)))))
        return Captured(record, time.perf_counter() - begun)

    def close(self) -> None:
        """It is nothing to stop."""


def generate(run: PreparedRun, first: int, count: int, rate: float) -> None:
    # A generator asks its engine for no more than this here.
    engines = [EmulatedEngine(run, rate) for _ in range(count)]
    generators = [
        Generator(run, engine, f"generator-{first + index}")  # pyright: ignore[reportArgumentType]
        for index, engine in enumerate(engines)
    ]
    print("ready", flush=True)
    with ThreadPoolExecutor(count) as threads:
        print(sum(threads.map(Generator.run, generators)), "samples captured", flush=True)


def read(run: PreparedRun, mine: int, orders: Connection) -> None:
    """Copy the samples of some ranks out of the store, and delete them there."""
    opened: Transport = run.open_transport()
    while text := orders.recv_bytes():
        plan = StepPlan.model_validate_json(text)
        for sample in plan.samples:
            if sample.rank % READERS == mine:
                into = {one.name: memoryview(bytearray(one.nbytes)) for one in sample.object.buffers}
                opened.get(sample.object, into)
                opened.delete(sample.object.key)
        orders.send_bytes(b"done")


def train(run: PreparedRun, rate: float, prefetch: int) -> None:
    """Rank 0; what it prints last are the times of all steps."""
    pipes = [Pipe() for _ in range(READERS)]
    readers = [Process(target=read, args=(run, index, theirs), daemon=True) for index, (_, theirs) in enumerate(pipes)]
    for process in readers:
        process.start()
    settings, step, ended, spent = run.config.training, 0, list[float](), {"plan": 0.0, "fetch": 0.0, "release": 0.0}
    step_s = settings.samples_per_step / rate
    with run.open_ledger() as ledger:
        incarnation = resume_run(ledger, lambda _: True, lambda _: True).incarnation
        ledger.open_epoch(incarnation, 0, run.epoch_slots(0))
        print("ready", flush=True)
        trained_at = time.perf_counter()
        while True:
            begun = time.perf_counter()
            plan = plan_step(
                ledger, incarnation, 0, step + 1, ranks=settings.ranks, micro_batches=1,
                samples_per_step=settings.samples_per_step,
            )  # fmt: skip
            if isinstance(plan, Wait):
                time.sleep(POLL_S)
                continue
            if isinstance(plan, EndOfEpoch):
                break
            planned, text = time.perf_counter(), plan.model_dump_json().encode()
            for mine, _ in pipes:
                mine.send_bytes(text)
            assert all(mine.recv_bytes() for mine, _ in pipes)
            fetched = time.perf_counter()
            ledger.release(incarnation, 0, *(sample.ordinal for sample in plan.samples))
            released = time.perf_counter()
            spent["plan"] += planned - begun
            spent["fetch"] += fetched - planned
            spent["release"] += released - fetched
            step = plan.step
            # The step that is trained now ends when the ones before it have; `prefetch` more are read meanwhile.
            trained_at = max(trained_at, released) + step_s
            ended.append(trained_at)
            time.sleep(max(0.0, trained_at - prefetch * step_s - time.perf_counter()))
            if step % CHECKPOINT_STEPS == 0:
                commit(ledger, incarnation, step)
        commit(ledger, incarnation, step)
        ledger.finish(incarnation)
    for mine, _ in pipes:
        mine.send_bytes(b"")
    print(json.dumps({"ended": ended, "spent": spent}), flush=True)


def commit(ledger, incarnation: int, step: int) -> None:
    ledger.consumed_ranges(step)
    ledger.commit(incarnation, CheckpointRecord(step=step, path="", manifest_hash="", incarnation=incarnation))


if __name__ == "__main__":
    use_small_pieces()
    what, folder, *rest = sys.argv[1:]
    opened_run = PreparedRun.open(RunFolder(Path(folder)).path)
    if what == "generate":
        generate(opened_run, int(rest[0]), int(rest[1]), float(rest[2]))
    else:
        train(opened_run, float(rest[0]), int(rest[1]))
