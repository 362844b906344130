"""Waits for a store that is full or does not answer."""

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from infra.transport.base import StoreUnavailableError

WAIT_S = 60.0
"""Time for a person or a clean-up to free space. A process that gives up is started again and waits again."""
POLL_S = 0.1
FULL = frozenset({errno.ENOSPC, errno.EDQUOT})

Result = TypeVar("Result")


def wait_for_room(write: Callable[[], Result], folder: Path | str, nbytes: int, wait_s: float = WAIT_S) -> Result:
    """Call `write` until the file system of `folder` has room for its `nbytes`; what it returns.

    Raises StoreUnavailableError where it stays full for `wait_s` seconds. Other errors are raised at once.
    """
    reason = (
        f"no room for {nbytes} bytes, the file system of {folder} is full: free space there, lower "
        "transport.budget_mib, or set transport.folder to a larger file system"
    )
    return wait_for_store(write, is_full, reason, wait_s)


def is_full(error: Exception) -> bool:
    """Whether a file system had no room."""
    return isinstance(error, OSError) and error.errno in FULL


def wait_for_store(
    call: Callable[[], Result],
    passes: Callable[[Exception], bool],
    reason: str,
    wait_s: float = WAIT_S,
    errors: tuple[type[Exception], ...] = (OSError,),
) -> Result:
    """Repeat `call` while it raises one of `errors` that `passes`; what it returns. The reason is printed once.

    Raises StoreUnavailableError, with the reason, after `wait_s` seconds.
    """
    deadline, is_waiting = time.monotonic() + wait_s, False
    while True:
        try:
            return call()
        except errors as error:
            if not passes(error):
                raise
            if time.monotonic() > deadline:
                raise StoreUnavailableError(f"{reason} (waited {wait_s:g} s; the last error is: {error})") from error
        if not is_waiting:
            print(f"waiting up to {wait_s:g} s: {reason}", flush=True)
        is_waiting = True
        time.sleep(POLL_S)
