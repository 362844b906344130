"""Ports on loopback for the servers we start. Used by whoever starts one."""

import os
import random
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.locks import Lock, LockHeldError, hold

HOST = "127.0.0.1"
LASTING = range(21000, 29000)
"""Below those that the kernel gives to outgoing connections."""


def is_free(port: int) -> bool:
    """Whether nobody listens at a port of this machine."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError):
            return False
    return True


def any_free_port() -> int:
    """For a server that binds at once."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


@contextmanager
def reserved_port() -> Iterator[tuple[int, Lock]]:
    """For a server that binds only after minutes of loading: a free port, and the lock that keeps ours off it."""
    folder = Path(tempfile.gettempdir()) / f"draftsmith-ports-{os.getuid()}"
    for port in random.sample(LASTING, len(LASTING)):
        try:
            with hold(folder / str(port)) as lock:
                if is_free(port):
                    yield port, lock
                    return
        except LockHeldError:
            continue
    raise ValueError(f"no free port in {LASTING.start}..{LASTING.stop - 1} of this machine: stop what listens there")
