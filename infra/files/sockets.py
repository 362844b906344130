"""Unix sockets that only their owner may open."""

import os
import socket
from pathlib import Path

from infra.refusal import Refusal

LONGEST = 100
"""Bytes of a path; Linux allows 107."""


def listen(path: Path) -> socket.socket:
    """A socket that listens at `path`. One that a dead process left there is replaced.

    Raises Refusal for a path that is too long, taken, or in no folder.
    """
    _check(path)
    try:
        connect(path).close()
    except (FileNotFoundError, ConnectionRefusedError):
        path.unlink(missing_ok=True)
    else:
        raise Refusal(f"another process listens at {path}: give every server a path of its own")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise Refusal(f"no socket can be made at {path} ({error.strerror}): name a place in a folder of this user's, "
                      "on this machine's own disk") from error  # fmt: skip
    # Nobody can connect before it listens.
    os.chmod(path, 0o600)
    listener.listen(1)
    return listener


def connect(path: Path, timeout_s: float | None = None) -> socket.socket:
    """A connection to what listens at `path`. Raises OSError, and Refusal for a path that is too long."""
    _check(path)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise
    return connection


def _check(path: Path) -> None:
    if len(os.fsencode(path)) > LONGEST:
        raise Refusal(f"{path} is too long for a socket: {LONGEST} bytes at most")
