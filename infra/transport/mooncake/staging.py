"""Memory that Mooncake may read and write, used again and again: registering costs more than copying."""

import ctypes
import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

GRAIN = 16 * 2**20


@dataclass(frozen=True)
class StagingBuffer:
    """A registered piece of memory."""

    view: memoryview
    address: int


class Staging:
    """As many buffers as are in use at the same time, each grown to the largest object that it held.

    It lives as long as the process's client: memory that is registered must not be given back.
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
