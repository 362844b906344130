"""How a process ends: with one clear message when a person has to act, and with its parent. Used by every main."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

REFUSED = 2
"""Exit status of a process that was given something a person has to mend: starting it again would not help."""
PR_SET_PDEATHSIG = 1


def run_main(main: Callable[[], None]) -> None:
    """Run `main`; a ValueError (wrong input, with its remedy) becomes one message on stderr and exit status 2.

    Everything else is a defect and keeps its traceback.
    """
    try:
        main()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(REFUSED) from None


def die_with_parent(parent: int) -> None:
    """From now on the death of `parent` kills this process too (Linux; elsewhere its supervisor alone sees to that).

    For processes whose parent is no supervisor: torchrun puts its ranks into sessions of their own. The parent tells
    its process id: it may have died while this process was still importing.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit(1)
