"""Which of the trainer's machines will probably read a sample: its hidden states are put there."""

import threading
from functools import lru_cache

from infra.ledger.planning import balance
from infra.records.data_path import Lease
from infra.transport.base import READER
from models.run import PreparedRun, epoch_order


class Readers:
    """Plans the steps of an epoch as the ledger does while nothing is quarantined and samples come in order.

    Where that is not so, a sample is read from another machine, as it would be without this.
    """

    def __init__(self, run: PreparedRun):
        training = run.config.training
        self._run, self._machines = run, run.config.pools.training_machines
        self._groups = training.data_parallel_size
        self._micro_batches, self._step = training.micro_batches, training.samples_per_step
        self._lock = threading.Lock()  # captures ask at the same time, and an epoch's order takes a while
        self._lengths = lru_cache(2)(self._lengths_of)
        self._places = lru_cache(64)(self._places_of)

    def address(self, key: str, lease: Lease) -> str:
        """The key with which the sample's object is put (`infra.transport.base.Transport.put`)."""
        if self._run.config.transport.kind != "mooncake" or self._machines == 1:
            return key
        with self._lock:
            group = self._places(lease.epoch, lease.ordinal // self._step)[lease.ordinal % self._step]
        return f"{key}{READER}{group * self._machines // self._groups}"

    def _places_of(self, epoch: int, step: int) -> list[int]:
        """The groups of ranks that read the samples of the epoch's step."""
        first = step * self._step
        lengths = self._lengths(epoch)[first : first + self._step]
        return [group for group, _ in balance(lengths, self._groups, self._micro_batches)]

    def _lengths_of(self, epoch: int) -> list[int]:
        lengths = self._run.open_samples().lengths.tolist()
        return [lengths[sample] for sample in epoch_order(self._run.config.seed, epoch, len(lengths))]
