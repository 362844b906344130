"""A generator: leases samples, prefills them with the target, writes their hidden states. One process each.

`python -m models.capture.generator RUN --index I` runs until the ledger says that the run is finished.
"""

import argparse
import signal
import time
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

from infra.exit import run_main
from infra.ledger.ledger import Ledger
from infra.records import Lease
from infra.transport.base import Transport
from models.capture.canary import check_capture
from models.capture.layout import Layout
from models.data.sample_set import SampleSet
from models.run import DTYPES, Run
from models.targets.model import HiddenStates, TargetModel

IDLE_S = 0.05
CANARY_TOKENS = 32


class Generator:
    """The plain engine: one sample per forward, so that its values depend on nothing but the sample."""

    def __init__(self, run: Run, owner: str):
        self.owner = owner
        self.layout: Layout = run.layout
        self.ledger: Ledger = run.open_ledger()
        self.transport: Transport = run.open_transport()
        self.samples: SampleSet = run.open_samples()
        self.lease_samples = run.config.capture.lease_samples
        self.stopping = False
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = DTYPES[run.config.capture.compute_dtype]
        self.target = TargetModel.load(Path(run.target.path), run.config.target.aux_layer_ids, dtype, device)

    def prefill(self, tokens: Tensor) -> HiddenStates:
        """Hidden states of one sample, `tokens` `[T]`."""
        hidden = self.target.forward(tokens[None].to(self.target.device))
        return HiddenStates(aux=hidden.aux[0], last=hidden.last[0])

    def check_canary(self) -> None:
        """Raise ValueError unless a first capture agrees with an independent forward."""
        tokens = self.samples[0].tokens[:CANARY_TOKENS]
        check_capture(self.target, self.prefill(tokens), tokens, self.layout)

    def run(self) -> int:
        """Lease and capture until the run is finished; the number of published samples."""
        published = 0
        while not self.stopping and not self.ledger.finished():
            leases = self.ledger.lease(self.owner, self.lease_samples)
            for lease in leases:
                if self.stopping:
                    break
                published += self.capture(lease)
                self.ledger.renew(self.owner)
            if not leases:
                time.sleep(IDLE_S)
        self.ledger.give_back(self.owner)
        return published

    def capture(self, lease: Lease) -> bool:
        """Capture one sample; a failure is recorded with the sample and the generator goes on."""
        key = self.ledger.key(lease)
        try:
            tokens = self.samples[lease.sample].tokens
            if len(tokens) != lease.tokens:
                raise ValueError(f"sample {lease.sample} has {len(tokens)} tokens, the ledger says {lease.tokens}")
            started = time.perf_counter()
            hidden = self.prefill(tokens)
            if not bool(torch.isfinite(hidden.aux).all() & torch.isfinite(hidden.last).all()):
                raise ValueError(f"sample {lease.sample}: hidden states are not finite")
            captured = time.perf_counter()
            record = self.transport.put(key, self.layout.pack(hidden))
        except Exception as error:  # noqa: BLE001 (one bad sample must not end a generator; the ledger keeps the error)
            print(f"sample {lease.sample} failed: {type(error).__name__}: {error}", flush=True)
            self.ledger.fail(lease, f"{type(error).__name__}: {error}")
            return False
        if self.ledger.publish(lease, record, captured - started, time.perf_counter() - captured):
            return True
        self.transport.delete(key)
        return False

    def stop(self, _signal: int, _frame: FrameType | None) -> None:
        """Finish the sample in hand, give the other leases back, and end."""
        self.stopping = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--index", type=int, default=0)
    arguments = parser.parse_args()
    run = Run.open(arguments.run)
    if run.config.capture.threads:
        torch.set_num_threads(run.config.capture.threads)
    started = time.monotonic()
    generator = Generator(run, f"generator-{arguments.index}")
    # Whoever had this index before is dead: what it held need not wait for its leases to expire.
    generator.ledger.give_back(generator.owner)
    signal.signal(signal.SIGTERM, generator.stop)
    generator.check_canary()
    print(f"generator {arguments.index} ready after {time.monotonic() - started:.1f} s: canary passed", flush=True)
    published = generator.run()
    print(f"generator {arguments.index} done: {published} samples captured", flush=True)


if __name__ == "__main__":
    run_main(main)
