"""One process's client of a Mooncake store.

Objects are cut into pieces: equal sizes leave no holes too small for anybody, and a batch of pieces travels at once.
"""

import ctypes
import mmap
import re
import socket
import threading
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from infra.network.ports import own_address
from infra.network.rdma import nearest_devices
from infra.records.data_path import StoreRecord
from infra.refusal import Refusal
from infra.settings import own_gpus, use_mooncake_settings
from infra.transport.base import StoreUnavailableError, TransferError
from infra.transport.mooncake.environment import INSTALL, check_mooncake

PIECE = 4 * 2**20
WAIT_S = 60.0
"""Timeout for space, for a master or store that restarts, and for an interface that comes back."""
POLL_S = 0.02
GRAIN = 16 * 2**20
"""Staging buffers are a multiple of this size."""
LIST_S = 10.0
REMOVED_AT_ONCE = 8
"""Pieces of an object that are removed first: 32 MiB of them."""
NO_ROOM, GONE, TOO_SLOW, NO_TRANSFER, NO_MASTER = -200, -704, -707, -800, -900
REASONS = {
    NO_ROOM: "the store is full; raise transport.budget_mib",
    GONE: "it is gone from the store",
    TOO_SLOW: "reading takes longer than Mooncake allows, ten seconds; is this machine or its network overloaded?",
    NO_TRANSFER: "the transfer failed; is the store's process there, and the network?",
    NO_MASTER: "the store's master does not answer",
}
PASSES = frozenset({NO_ROOM, NO_TRANSFER, NO_MASTER})
"""What a writer waits for."""
PASSES_FOR_READERS = frozenset({TOO_SLOW, NO_MASTER})
"""What says nothing about the object."""

Piece = tuple[str, int, int]
"""Key, address, bytes."""


class StagingBuffer(NamedTuple):
    """A registered piece of memory."""

    view: memoryview
    address: int


class Staging:
    """Memory that Mooncake may read and write, used again and again: registering costs more than copying.

    There are as many buffers as are in use at the same time, each grown to the largest object that it held. They live
    as long as the process's client: memory that is registered must not be given back.
    """

    def __init__(self, register: Callable[[int, int], None], unregister: Callable[[int], None]):
        self._register, self._unregister = register, unregister
        self._lock = threading.Lock()
        self._free: list[StagingBuffer] = []

    @contextmanager
    def take(self, nbytes: int) -> Iterator[StagingBuffer]:
        """A buffer of at least `nbytes` bytes, for the length of the block."""
        with self._lock:
            buffer = self._free.pop() if self._free else None
        if buffer is None or buffer.view.nbytes < nbytes:
            if buffer is not None:
                self._unregister(buffer.address)
            buffer = self._make(-(-nbytes // GRAIN) * GRAIN)
        try:
            yield buffer
        finally:
            with self._lock:
                self._free.append(buffer)

    def _make(self, nbytes: int) -> StagingBuffer:
        # Touched now: a transfer into pages that do not exist yet is several times slower.
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._register(address, nbytes)
        return StagingBuffer(memoryview(memory), address)


class MooncakeClient:
    """Threads share it. Raises ConnectionError where no store answers, Refusal where Mooncake is missing."""

    def __init__(self, store: StoreRecord, wait_s: float = WAIT_S):
        check_mooncake()
        use_mooncake_settings()
        try:
            from mooncake.store import (  # pyright: ignore[reportMissingImports]
                MooncakeDistributedStore,
                ReplicateConfig,
            )
        except ImportError as error:
            raise Refusal(f"transport.kind=mooncake: Mooncake does not load ({error}): {INSTALL}") from error

        self._web, self._wait_s = store.web, wait_s
        self._parts, self._names, self._placed = store.parts, Path(store.names), ReplicateConfig
        self.store = MooncakeDistributedStore()
        address = own_address(store.master)
        # No memory of its own: a generator that leaves must not take unread samples along.
        devices = _near_devices() if store.protocol == "rdma" else ""
        status = self.store.setup(address, "P2PHANDSHAKE", 0, 0, store.protocol, devices, store.master)
        if status:
            raise ConnectionError(f"no Mooncake store answers at {store.master} (status {status}){_own(address)}")
        self.staging = Staging(self.register, self.unregister)

    def put(self, key: str, address: int, nbytes: int, part: int | None = None) -> None:
        """Write an object from registered memory; waits where the store is full or away.

        All of it goes to one part of the store, this `part` or one that the key decides, and elsewhere only where that
        is full or gone: a part that dies takes few objects along. Raises TransferError, with nothing left behind.
        """
        if self.store.is_exist(_piece_key(key, 0)) == 1:
            self.delete(key)  # Mooncake keeps what is there and says that all is well
        left, deadline = _pieces(key, address, nbytes), time.monotonic() + self._wait_s
        part = zlib.crc32(key.encode()) if part is None else part
        while left:
            worst, left = self._write(left, part % self._parts)
            if left and (worst not in PASSES or time.monotonic() > deadline):
                self._forget(key)
                kind = StoreUnavailableError if worst in PASSES else TransferError
                raise kind(f"cannot write {key} ({nbytes} bytes): {_reason(worst)}")
            if left:
                time.sleep(POLL_S)

    def _placement(self, part: int) -> Any:
        """Where Mooncake is to write: a part that was restarted has another name."""
        placed = self._placed()
        placed.with_hard_pin = True  # never evicted: unread samples are no cache
        if self._parts > 1 and (name := self._names / str(part)).is_file():
            placed.preferred_segments = [name.read_text()]
        return placed

    def _write(self, pieces: list[Piece], part: int) -> tuple[int, list[Piece]]:
        """The worst status, and the pieces that are not there yet.

        A piece of which a broken-off write left a trace counts as written at the next try: so it is asked for, and
        what is not whole is removed.
        """
        statuses = self.store.batch_put_from(*_columns(pieces), self._placement(part))
        there = self.store.batch_is_exist([key for key, _, _ in pieces])
        left = [piece for piece, status, found in zip(pieces, statuses, there, strict=True) if status or found != 1]
        if left:
            self.store.batch_remove([key for key, _, _ in left], True)
        return min(statuses) or NO_TRANSFER, left

    def get(self, key: str, address: int, nbytes: int, numbers: Sequence[int] | None = None) -> None:
        """Read an object of `nbytes` into registered memory, or the pieces of it with these `numbers`, side by side.

        Raises TransferError.
        """
        pieces = _pieces(key, address, nbytes)
        if numbers is not None:
            pieces = [(name, address + i * PIECE, size) for i, (name, _, size) in enumerate(pieces[n] for n in numbers)]

        def read() -> int:
            found = self.store.batch_get_into(*_columns(pieces))
            return min((status for status, piece in zip(found, pieces, strict=True) if status != piece[2]), default=0)

        status = self._once_the_master_answers(read)
        if status:
            kind = StoreUnavailableError if status in PASSES_FOR_READERS else TransferError
            raise kind(f"{key} cannot be read: {_reason(status)}")

    def delete(self, key: str) -> None:
        """Delete an object, whatever pieces of it there are. Raises TransferError where the master does not answer."""
        status = self._once_the_master_answers(lambda: self._remove(key))
        if status == NO_MASTER:
            raise StoreUnavailableError(f"{key} cannot be deleted: {_reason(status)}")

    def _remove(self, key: str) -> int:
        """Remove pieces up to the first that is missing. Where that is the very first, what a broken-off write left."""
        first, group = 0, REMOVED_AT_ONCE
        while True:
            statuses = self.store.batch_remove([_piece_key(key, first + index) for index in range(group)], True)
            if NO_MASTER in statuses:
                return NO_MASTER
            if first == 0 and statuses[0] == GONE:
                return self._forget(key)
            if GONE in statuses:
                return 0
            first, group = first + group, 2 * group

    def _forget(self, key: str) -> int:
        """Remove all pieces that there are. The master looks at every key that it has."""
        return self.store.remove_by_regex(f"^{re.escape(key)}#", True)

    def keys(self) -> list[str]:
        """Keys of all objects. Raises OSError where the master does not answer."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"http://{self._web}/get_all_keys", timeout=LIST_S) as answer:
            return sorted({line.rpartition("#")[0] for line in answer.read().decode().splitlines()})

    def _once_the_master_answers(self, ask: Callable[[], int]) -> int:
        deadline = time.monotonic() + self._wait_s
        while (status := ask()) in PASSES_FOR_READERS and time.monotonic() < deadline:
            time.sleep(POLL_S)
        return status

    def register(self, address: int, nbytes: int) -> None:
        """Have Mooncake read and write this memory, which must not be given back before `unregister`."""
        status = self.store.register_buffer(address, nbytes)
        if status:
            raise Refusal(
                f"Mooncake cannot register {nbytes} bytes of memory (status {status}): `ulimit -l` bounds it, and a "
                "GPU's memory needs the kernel module nvidia-peermem; for the latter, set transport.receive=host"
            )

    def unregister(self, address: int) -> None:
        self.store.unregister_buffer(address)


def _near_devices() -> str:
    """RDMA devices near this process's GPUs, or near its own where it is a trainer rank; all of them on the CPU."""
    gpus: list[str] = []
    if own := own_gpus():
        from infra.pools.gpus import pci_addresses  # NVML is not in every environment that captures

        gpus = pci_addresses(own)
    return ",".join(nearest_devices(gpus))


def _own(address: str) -> str:
    """What to do where a store's master was looked for on this machine alone."""
    if not address.startswith("127."):
        return ""
    return f": on {socket.gethostname()} that is itself; if the flow runs elsewhere, set transport.address"


def client_of(store: StoreRecord) -> MooncakeClient:
    """This process's client of a store: each is threads and sockets, so there is one."""
    return _only_client(store.model_dump_json())


@cache
def _only_client(store: str) -> MooncakeClient:
    return MooncakeClient(StoreRecord.model_validate_json(store))


def _piece_key(key: str, index: int) -> str:
    return f"{key}#{index}"


def _pieces(key: str, address: int, nbytes: int) -> list[Piece]:
    starts = range(0, nbytes, PIECE)
    return [(_piece_key(key, i), address + at, min(PIECE, nbytes - at)) for i, at in enumerate(starts)]


def _columns(pieces: Sequence[Piece]) -> tuple[list[str], list[int], list[int]]:
    return [piece[0] for piece in pieces], [piece[1] for piece in pieces], [piece[2] for piece in pieces]


def _reason(status: int) -> str:
    return REASONS.get(status, f"Mooncake's status {status}")
