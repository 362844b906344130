"""The transport between machines: a Mooncake store, by RDMA or TCP.

Objects lie in the store's own process: whoever wrote one may leave, and whoever reads one may die.
"""

from collections.abc import Iterator, Mapping

from infra.records.data_path import BufferRecord, ObjectRecord, StoreRecord
from infra.transport.base import Buffer, blocks, fill, flat, reads_back
from infra.transport.copying import BlockSums, copy_hashed
from infra.transport.mooncake.client import PIECE, client_of

LOCATION = "mooncake"


class MooncakeTransport:
    """Objects in a store that every process of the run reaches."""

    def __init__(self, store: StoreRecord):
        self.protocol = store.protocol
        self._client = client_of(store)
        self._staging = self._client.staging

    def put(self, key: str, buffers: Mapping[str, Buffer]) -> ObjectRecord:
        """Write the buffers. Raises TransferError if the store stays full or unreachable."""
        views, nbytes = flat(buffers, key)
        with self._staging.take(nbytes) as staged:
            records, start = [], 0
            for name, view in views.items():
                sums = BlockSums()
                copy_hashed(staged.view[start : start + view.nbytes], view, sums)
                records.append(BufferRecord(name=name, nbytes=view.nbytes, xxh3=sums.hexdigest()))
                start += view.nbytes
            self._client.put(key, staged.address, nbytes)
        return ObjectRecord(key=key, location=LOCATION, buffers=tuple(records))

    def get(
        self, record: ObjectRecord, into: Mapping[str, memoryview], starts: Mapping[str, int] | None = None
    ) -> None:
        """Copy the object, or parts of it, into `into` and verify sizes and checksums.

        The store gives pieces: of a part those that hold its blocks are read.
        """
        ends = ((block.start, block.start + block.nbytes) for block in blocks(record, into, starts))
        pieces = sorted({piece for start, end in ends for piece in range(start // PIECE, -(-end // PIECE))})
        places = {piece: number * PIECE for number, piece in enumerate(pieces)}
        with self._staging.take(len(pieces) * PIECE) as staged:
            self._client.get(record.key, staged.address, record.nbytes, pieces)

            def read(start: int, view: memoryview) -> str:
                # A block's pieces stand side by side: none of them is left out.
                place, sums = places[start // PIECE] + start % PIECE, BlockSums()
                copy_hashed(view, staged.view[place : place + view.nbytes], sums)
                return sums.hexdigest()

            fill(record, into, starts, read)

    def read(self, record: ObjectRecord, address: int) -> None:
        """Read the object, its buffers one after the other, into registered memory; nothing is verified.

        Raises TransferError.
        """
        self._client.get(record.key, address, record.nbytes)

    def register(self, address: int, nbytes: int) -> None:
        """Register memory of this machine or its GPUs as a destination of `read`. Raises Refusal if that fails."""
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
