"""Copies bytes and takes their checksum on the way, while they are in the processor's cache. Used by transports."""

import xxhash

CHUNK = 256 * 2**10
"""Bytes copied, then hashed: they fit into the second-level cache."""


def copy_hashed(into: memoryview, source: memoryview, hashing: xxhash.xxh3_128) -> None:
    """Copy `source` to `into`, of the same size, and add what arrived to the checksum."""
    for at in range(0, source.nbytes, CHUNK):
        arrived = into[at : at + CHUNK]
        arrived[:] = source[at : at + CHUNK]
        hashing.update(arrived)
