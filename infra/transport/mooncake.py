"""The transport between machines: a Mooncake store, by RDMA or TCP. Runs in generators and trainer ranks.

Objects lie in the store's own process: whoever wrote one may leave, and whoever reads one may die.
"""

from collections.abc import Iterator, Mapping

import xxhash

from infra.mooncake.client import client_of
from infra.records import BufferRecord, ObjectRecord, StoreRecord
from infra.transport.base import Buffer, check_sum, flat, reads_back, target
from infra.transport.copying import copy_hashed

LOCATION = "mooncake"


class MooncakeTransport:
    """Objects in a store that every process of the run reaches."""

    def __init__(self, store: StoreRecord):
        self.protocol = store.protocol
        self._client = client_of(store)
        self._staging = self._client.staging

    def put(self, key: str, buffers: Mapping[str, Buffer]) -> ObjectRecord:
        """Write the buffers one after the other. Raises TransferError where the store stays full or away."""
        views, nbytes = flat(buffers, key)
        with self._staging.take(nbytes) as staged:
            records, start = [], 0
            for name, view in views.items():
                hashing = xxhash.xxh3_128()
                copy_hashed(staged.view[start : start + view.nbytes], view, hashing)
                records.append(BufferRecord(name=name, nbytes=view.nbytes, xxh3=hashing.hexdigest()))
                start += view.nbytes
            self._client.put(key, staged.address, nbytes)
        return ObjectRecord(key=key, location=LOCATION, buffers=tuple(records))

    def get(self, record: ObjectRecord, into: Mapping[str, memoryview]) -> None:
        """Copy the object into `into` and verify sizes and checksums."""
        with self._staging.take(record.nbytes) as staged:
            self._client.get(record.key, staged.address, record.nbytes)
            start = 0
            for buffer in record.buffers:
                view, hashing = target(record, buffer, into), xxhash.xxh3_128()
                copy_hashed(view, staged.view[start : start + buffer.nbytes], hashing)
                check_sum(record, buffer, hashing.hexdigest())
                start += buffer.nbytes

    def read(self, record: ObjectRecord, address: int) -> None:
        """Read the object, its buffers one after the other, into registered memory; nothing is verified.

        Raises TransferError.
        """
        self._client.get(record.key, address, record.nbytes)

    def register(self, address: int, nbytes: int) -> None:
        """Have memory of this machine or of its GPUs written to by `read`. Raises ValueError where it cannot be."""
        self._client.register(address, nbytes)

    def unregister(self, address: int) -> None:
        self._client.unregister(address)

    def verify(self, record: ObjectRecord) -> bool:
        """Read the object back and compare its checksums."""
        return reads_back(self, record)

    def delete(self, key: str) -> None:
        self._client.delete(key)

    def keys(self) -> Iterator[str]:
        yield from self._client.keys()

    def close(self) -> None:
        """The process's client stays: other transports of this process share it."""
