"""Repeats a call while what it needs is full, locked or away."""

import time
from collections.abc import Callable
from typing import TypeVar

POLL_S = 0.1

Result = TypeVar("Result")


def wait_while(
    passes: Callable[[Exception], bool],
    call: Callable[[], Result],
    reason: str,
    wait_s: float,
    errors: tuple[type[Exception], ...] = (OSError,),
) -> Result:
    """Repeat `call` while it raises one of `errors` that `passes`; what it returns. The reason is printed once.

    Raises the last error after `wait_s` seconds, and any other at once.
    """
    deadline, is_waiting = time.monotonic() + wait_s, False
    while True:
        try:
            return call()
        except errors as error:
            if not passes(error) or time.monotonic() > deadline:
                raise
            said = next(iter(str(error).splitlines()), "")
        if not is_waiting:
            print(f"waiting up to {wait_s:g} s: {reason} ({said})", flush=True)
        is_waiting = True
        time.sleep(POLL_S)
