"""`python -m models.capture.generator RUN --index I`: leases and captures samples until the run is finished.

With data.regeneration.capture most samples are prompts: the target answers them while they are captured. The ledger
keeps the answer, and whoever captures such a sample again prefills the same text.
"""

import argparse
import signal
import time
from collections import deque
from collections.abc import Collection
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from pathlib import Path
from types import FrameType

import torch

from infra.files.atomic import write_atomically
from infra.ledger.generators import Publication
from infra.processes.exit import run_main
from infra.records.data_path import Lease
from infra.refusal import Refusal
from infra.run.gpu_use import measured_use
from infra.transport.choice import sweep
from models.capture.engine import CANARY_TOKENS, Captured, CaptureEngine, EngineError, StoredEngine
from models.capture.heldout import lacks_heldout, make_heldout
from models.capture.readers import Readers
from models.devices import limit_memory
from models.run import PreparedRun
from models.targets.layout import SampleError

IDLE_S = (0.05, 0.2)
"""Pause between two requests for leases while there are none: it doubles, for every request locks the run."""
WAIT_S = 1.0
"""Longest wait for a capture before leases are renewed and a stop is noticed."""
GATHER_S = 0.2
"""Longest wait of a capture for others that are published with it."""


class Generator:
    """Keeps its engine busy with leased samples, and records results in the ledger."""

    def __init__(self, run: PreparedRun, engine: CaptureEngine, owner: str):
        self._run, self.owner, self.engine = run, owner, engine
        self.ledger, self.transport, self.samples = run.open_ledger(), run.open_transport(), run.open_samples()
        self.readers = Readers(run)
        self.lease_samples = run.config.generator.leased
        self.canaries = self.samples.canaries(CANARY_TOKENS)
        self.has_others = run.config.generator.most > 1
        self.renew_s = run.config.ledger.lease_seconds / 4
        self.stopping = self._finished = False
        self._idle_s = IDLE_S[0]
        self._waiting: deque[Lease] = deque()
        self._flying: dict[Future[Captured], tuple[Lease, float]] = {}
        self._heldout: Future[None] | None = None
        """Held-out texts that are being made."""
        self._last_done = self._renewed = 0.0

    def run(self) -> int:
        """Lease and capture until the run is finished. Returns the number of published samples.

        Raises faults of the engine and the machine, which do not count against samples. Always gives all leases back,
        so that other generators need not wait for them to expire.
        """
        published = 0
        try:
            # On an error `closing` runs first: it ends the captures that the threads wait for.
            with ThreadPoolExecutor(self.engine.in_flight) as threads, closing(self.engine):
                self._exchange([])
                while not self.stopping and not self._finished:
                    published += self._collect(threads)
                while self._flying and self.stopping and not self.engine.waits:
                    published += self._collect(threads)
                if self._heldout is not None:
                    self._heldout.cancel()
        finally:
            self.ledger.give_back(self.owner)
        return published

    def _collect(self, threads: ThreadPoolExecutor) -> int:
        """Let the engine work until some captures have ended, publish them, and record the failed ones.

        Returns the number of published samples.
        """
        self._fill(threads)
        if not self._flying:
            time.sleep(self._idle_s)
        done, _ = wait(self._flying, WAIT_S, FIRST_COMPLETED)
        ended, until = self._ended(done), time.perf_counter() + GATHER_S
        # The engine must not wait for the ledger: leases are asked for as soon as it could take one more.
        while self._waiting and len(ended) < self.lease_samples and not any(f.exception() for f, *_ in ended):
            self._fill(threads)
            done, _ = wait(self._flying, max(0.0, until - time.perf_counter()), FIRST_COMPLETED)
            if not done or self.stopping:
                break
            ended += self._ended(done)
        self._fill(threads)
        published = self._exchange([(lease, begun, f.result()) for f, lease, begun in ended if not f.exception()])
        for future, lease, _ in ended:
            self._record_failure(future, lease)
        if time.perf_counter() - self._renewed > self.renew_s:
            self._renewed = time.perf_counter()
            self.ledger.renew(self.owner)
            self._look_for_heldout(threads)
        return published

    def _look_for_heldout(self, threads: ThreadPoolExecutor) -> None:
        """Have the held-out texts made among the captures where there are none: whoever began them may be lost.

        Raises what made the last attempt fail.
        """
        if self._heldout is not None and self._heldout.done():
            self._heldout.result()
            self._heldout = None
        if self._heldout is None and not self.stopping and lacks_heldout(self._run):
            self._heldout = threads.submit(make_heldout, self._run, self.engine)

    def _fill(self, threads: ThreadPoolExecutor) -> None:
        """Submit one sample more than the engine captures at a time, so that it never waits for the ledger."""
        while self._waiting and len(self._flying) <= self.engine.in_flight and not self.stopping:
            lease = self._waiting.popleft()
            self._flying[threads.submit(self._capture, lease)] = (lease, time.perf_counter())

    def _ended(self, done: Collection[Future[Captured]]) -> list[tuple[Future[Captured], Lease, float]]:
        return [(future, *self._flying.pop(future)) for future in done]

    def _capture(self, lease: Lease) -> Captured:
        """Capture one sample. Raises SampleError only if the engine still passes its canary."""
        sample = self.samples.answered(lease.sample, lease.answer)
        key = self.readers.address(self.ledger.key(lease), lease)
        prompt = self.samples.prompt(lease.sample) if lease.answer is None else None
        try:
            if len(sample.tokens) != lease.tokens:
                raise SampleError(f"it has {len(sample.tokens)} tokens, and the ledger says {lease.tokens}")
            if prompt is not None:
                return self.engine.answer(key, prompt, lease.tokens - len(prompt))
            return self.engine.capture(key, sample.tokens, sample.images)
        except SampleError as error:
            try:
                self.check_canaries()
            except Refusal as fault:
                raise EngineError(
                    f"sample {lease.sample} failed ({error}), and the canary fails too, so the engine is at fault: "
                    f"{fault}"
                ) from fault
            raise

    def check_canaries(self) -> None:
        """Raises Refusal where the engine does not capture what an independent forward computes."""
        for sample in self.canaries:
            self.engine.check_canary(sample.tokens, sample.images)

    def _exchange(self, captures: list[tuple[Lease, float, Captured]]) -> int:
        """Publish captures with the times they began, and lease more if the engine could take one.

        Returns the number of captures whose lease was still held.
        """
        # Captures overlap: these share the time since the previous ones, so that the sum is the busy time.
        now, count = time.perf_counter(), max(1, len(captures))
        busy_s = now - max(self._last_done, min((begun for _, begun, _ in captures), default=now))
        prefill_s = max(0.0, busy_s - sum(captured.put_s for *_, captured in captures)) / count
        self._last_done = now if captures else self._last_done
        offered = [
            Publication(lease, captured.record, prefill_s, captured.put_s, captured.answer)
            for lease, _, captured in captures
        ]
        hungry = not self._waiting and not self.stopping and len(self._flying) <= self.engine.in_flight
        limit = self.lease_samples if hungry else 0
        lost, leases, self._finished = self.ledger.exchange(self.owner, offered, limit, self.has_others)
        for publication in lost:
            self.transport.delete(publication.record.key)
        self._waiting.extend(leases)
        if hungry:
            self._idle_s = IDLE_S[0] if leases else min(2 * self._idle_s, IDLE_S[1])
        return len(offered) - len(lost)

    def _record_failure(self, future: Future[Captured], lease: Lease) -> None:
        """Record a failed attempt. Raises faults of the engine and the machine."""
        try:
            future.result()
        except SampleError as error:
            print(f"sample {lease.sample} failed, and the canary passed after it: {error}", flush=True)
            self.ledger.fail(lease, str(error))

    def take_over(self) -> None:
        """Release the leases and objects of a dead generator with the same index."""
        self.ledger.give_back(self.owner)
        sweep(self.transport, self.ledger.held_keys)

    def stop(self, _signal: int, _frame: FrameType | None) -> None:
        """Signal handler: finish captures in flight, give the other leases back, and end."""
        self.stopping = True


def start_engine(run: PreparedRun, index: int) -> CaptureEngine:
    """Start the engine of the run's configuration. Raises Refusal for a faulty setup."""
    if run.config.generator.engine == "sglang":
        from models.capture.sglang.engine import SGLangEngine

        engine: CaptureEngine = SGLangEngine(run, index)
    elif run.config.generator.engine == "serving":
        from models.capture.sglang.serving import ServingEngine

        engine = ServingEngine(run, index)
    else:
        from models.capture.plain_engine import PlainEngine

        limit_memory(run.sharing.generator_bytes)
        engine = PlainEngine(run)
    return StoredEngine(run, engine) if run.config.transport.kind == "stored" else engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--index", type=int, default=0)
    arguments = parser.parse_args()
    run = PreparedRun.open(arguments.run)
    if run.config.generator.threads:
        torch.set_num_threads(run.config.generator.threads)
    started = time.monotonic()
    with measured_use(run.folder, "inference"), closing(start_engine(run, arguments.index)) as engine:
        generator = Generator(run, engine, f"generator-{arguments.index}")
        generator.take_over()
        generator.check_canaries()
        # Not generator 0 alone, whose device may be broken. While one makes the texts, the others go on without them,
        # and look again later.
        write_atomically(run.folder.precision, engine.precision())
        make_heldout(run, engine)
        signal.signal(signal.SIGTERM, generator.stop)
        print(f"generator {arguments.index} ready after {time.monotonic() - started:.1f} s: canary passed", flush=True)
        published = generator.run()
    print(f"generator {arguments.index} done: {published} samples captured", flush=True)


if __name__ == "__main__":
    run_main(main)
