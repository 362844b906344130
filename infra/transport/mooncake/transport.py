"""The transport between machines: a Mooncake store, by RDMA or TCP.

Objects lie in the store's own process: whoever wrote one may leave, and whoever reads one may die.
"""

from collections.abc import Mapping

from infra.records.data_path import BufferRecord, ObjectRecord, StoreRecord
from infra.transport.base import READER, BlockSums, Buffer, Transport, blocks, copy_hashed, fill, flat
from infra.transport.mooncake.client import PIECE, client_of

LOCATION = "mooncake"


class MooncakeTransport(Transport):
    """Objects in a store that every process of the run reaches.

    The process's client stays when a transport is closed: other transports of this process share it.
    """

    def __init__(self, store: StoreRecord):
        self.protocol = store.protocol
        self.client = client_of(store)

    def put(self, key: str, buffers: Mapping[str, Buffer]) -> ObjectRecord:
        key, _, reader = key.partition(READER)
        views, nbytes = flat(buffers, key)
        with self.client.staging.take(nbytes) as staged:
            records, start = [], 0
            for name, view in views.items():
                sums = BlockSums()
                copy_hashed(staged.view[start : start + view.nbytes], view, sums)
                records.append(BufferRecord(name=name, nbytes=view.nbytes, xxh3=sums.hexdigest()))
                start += view.nbytes
            self.client.put(key, staged.address, nbytes, int(reader) if reader else None)
        return ObjectRecord(key=key, location=LOCATION, buffers=tuple(records))

    def get(
        self, record: ObjectRecord, into: Mapping[str, memoryview], starts: Mapping[str, int] | None = None
    ) -> None:
        # The store gives pieces: of a part those that hold its blocks are read.
        ends = ((block.start, block.start + block.nbytes) for block in blocks(record, into, starts))
        pieces = sorted({piece for start, end in ends for piece in range(start // PIECE, -(-end // PIECE))})
        places = {piece: number * PIECE for number, piece in enumerate(pieces)}
        with self.client.staging.take(len(pieces) * PIECE) as staged:
            self.client.get(record.key, staged.address, record.nbytes, pieces)

            def read(start: int, view: memoryview) -> str:
                # A block's pieces stand side by side: none of them is left out.
                place, sums = places[start // PIECE] + start % PIECE, BlockSums()
                copy_hashed(view, staged.view[place : place + view.nbytes], sums)
                return sums.hexdigest()

            fill(record, into, starts, read)

    def delete(self, key: str) -> None:
        self.client.delete(key)

    def keys(self) -> list[str]:
        return self.client.keys()
