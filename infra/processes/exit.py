"""How a process ends: with one message if a person has to act, on signals, and with its parent."""

import atexit
import ctypes
import gc
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from infra.refusal import Refusal
from infra.terminal import visible

REFUSED = 2
"""Exit status after a Refusal: a restart would not help."""
INTERRUPTED = 128 + signal.SIGINT
"""Exit status after Ctrl-C, as shells have it."""
STDOUT = 1
PR_SET_PDEATHSIG = 1


def run_main(main: Callable[[], None]) -> None:
    """Run `main`; a Refusal (wrong input, with its remedy) becomes one message on stderr and exit status 2.

    Ctrl-C (status 130) and a standard output that nobody reads any more, as after `| head` (1), end it without one.
    Everything else is a defect and keeps its traceback. What was imported is never searched for garbage, neither while
    the process runs nor when it ends, which would take a second and more with torch and transformers.
    """
    gc.freeze()
    gc.enable()  # `models` starts without
    atexit.register(gc.freeze)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # `models` starts with it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        try:
            main()
        finally:
            print(end="", flush=True)  # what cannot be written is a message of its own once the interpreter ends
    except Refusal as error:
        print(f"error: {visible(str(error))}", file=sys.stderr, flush=True)
        raise SystemExit(REFUSED) from None
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        if not _is_unread(STDOUT):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)  # for what the interpreter writes when it ends
        raise SystemExit(1) from None


def _is_unread(descriptor: int) -> bool:
    """Whether it is a pipe whose reader has gone."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def end_well() -> NoReturn:
    """End this process with status 0, but not its interpreter.

    For processes with threads of gloo or NCCL: one that gives a tensor back to Python while the interpreter ends calls
    std::terminate, and all that was done would count as a crash.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


@contextmanager
def told_to_stop() -> Iterator[threading.Event]:
    """Set by Ctrl-C and SIGTERM, so that neither interrupts the stopping itself."""
    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def die_with_parent(parent: int) -> None:
    """From now on the death of `parent` kills this process too (Linux; elsewhere its supervisor alone sees to that).

    For processes whose parent is no supervisor, such as the trainer's ranks. The parent passes its process id, because
    it may have died while this process was still importing.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit(1)
