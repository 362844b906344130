"""Runs one data-plane command and makes sure nothing of it outlives its starter. One process per command.

`python -I -S supervisor.py --grace S [--owns FOLDER ...] [--detached FD] -- COMMAND...`: standard input is a pipe whose
other end the starter holds. End of file there means that the starter is gone: SIGTERM to the command, a grace, SIGKILL
to every descendant, removal of the owned folders. SIGTERM does the same without the removal, which is then the
starter's. The supervisor adopts orphans (PR_SET_CHILD_SUBREAPER), since a command's children may have sessions of
their own. Detached it is nobody's child, and its status is written to the descriptor: Ray kills the children of a
worker that it ends, and would take the supervisor away before it could do its work.
Standard library only, and run by path: it starts in some 30 ms.
"""

import argparse
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
KILL_S = 10.0


def main() -> int:
    """Supervise the command of the command line; return its exit status (128 + n after signal n)."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--grace", type=float, required=True)
    parser.add_argument("--owns", action="append", default=[])
    parser.add_argument("--detached", type=int, metavar="FD")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    if options.detached is None:
        return supervise(options)
    if os.fork() == 0:
        os.setsid()
        os.set_inheritable(options.detached, False)
        os.write(options.detached, str(supervise(options)).encode())
    return 0


def supervise(options: argparse.Namespace) -> int:
    """Run the command to its end, or until it is to stop; nothing of it is left then."""
    wakeup = _wake_on_signals()
    libc, supervisor = ctypes.CDLL(None), os.getpid()
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = subprocess.Popen(
        options.command,
        stdin=subprocess.DEVNULL,
        process_group=0,
        # Sound here, unlike in the starter: this process has one thread, so the signal means that it died.
        preexec_fn=lambda: _die_with(supervisor, libc),  # noqa: PLW1509
    )
    orphaned = _wait(child, wakeup, options.grace)
    _kill_descendants()
    if orphaned:
        for folder in options.owns:
            shutil.rmtree(folder, ignore_errors=True)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _die_with(supervisor: int, libc: ctypes.CDLL) -> None:
    """In the command before it begins: die as soon as the supervisor does, or now if it was killed since the fork."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != supervisor:
        os.kill(os.getpid(), signal.SIGKILL)


def _wake_on_signals() -> int:
    """Turn SIGCHLD, SIGTERM and SIGINT into bytes on a pipe; return its read end."""
    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(write)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    return read


def _wait(child: subprocess.Popen[bytes], wakeup: int, grace: float) -> bool:
    """Wait for the command, stopping it when told to or when the starter is gone; return whether it is gone."""
    orphaned = False
    deadline: float | None = None
    starter = sys.stdin.fileno()
    listen = [starter, wakeup]
    while child.poll() is None:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            break
        readable, _, _ = select.select(listen, [], [], left)
        stop = wakeup in readable and bool({signal.SIGTERM, signal.SIGINT} & set(os.read(wakeup, 4096)))
        if starter in readable:  # nothing is ever written to it: readable means end of file
            listen.remove(starter)
            orphaned = stop = True
        if stop and deadline is None and child.poll() is None:
            deadline = time.monotonic() + grace
            os.killpg(child.pid, signal.SIGTERM)
    if child.returncode is None:
        os.killpg(child.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # in a call of the kernel that does not return
            child.wait(KILL_S)
    return orphaned or bool(select.select([starter], [], [], 0)[0])


def _kill_descendants() -> None:
    """SIGKILL and reap whatever is left below this process, in whichever session it hides."""
    deadline = time.monotonic() + KILL_S
    while time.monotonic() < deadline:
        for pid in descendants(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        time.sleep(0.02)


def descendants(pid: int) -> list[int]:
    """Process ids below `pid`, from /proc."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(stat.parent.name)] = int(fields[1])
    found = {pid}
    while True:
        grown = found | {child for child, parent in parents.items() if parent in found}
        if grown == found:
            return sorted(found - {pid})
        found = grown


if __name__ == "__main__":
    sys.exit(main())
