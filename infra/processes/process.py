"""Starts data-plane commands under a supervisor, follows their logs and stops them."""

import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from infra.files.folders import make_folder
from infra.processes import supervisor
from infra.processes.exit import REFUSED
from infra.refusal import Refusal
from infra.settings import reach_loopback_directly, tools_environment

TAIL_LINES = 20
EXCEPTION = re.compile(r"(\[rank\d+\]: )?(\w+\.)*\w*Error: .")
"""The last line of a traceback: names an exception, with its message."""
POLL_S = 0.2
STOP_MARGIN_S = 60.0
"""A supervisor that gets no core takes so long; killed, it would leave behind what hides in sessions of its own."""


class ProcessFailedError(Exception):
    """A data-plane process ended with an error; the message quotes the end of its log."""

    def __init__(self, role: str, exit_code: int, tail: list[str], log: Path) -> None:
        self.role = role
        self.exit_code = exit_code
        self.tail = tail
        self.log = log
        # Go's programs end with 255 after a fault of their own.
        killed = 128 < exit_code <= 128 + signal.SIGRTMAX
        ending = f"was killed by signal {exit_code - 128}" if killed else f"ended with exit code {exit_code}"
        self.headline = f"{role} {ending}"
        quoted = "\n".join(f"  | {line}" for line in tail) or "  | (nothing was printed)"
        # A container shows nothing else of it.
        memory = ", as the kernel does where memory runs out" if exit_code == 128 + signal.SIGKILL else ""
        super().__init__(f"{self.headline}{memory}. The end of {log}:\n{quoted}")

    @property
    def cause(self) -> str:
        """The exception named at the end of the process's log; empty if there is none."""
        raised = [line for line in self.tail if EXCEPTION.match(line)] if self.exit_code < 128 else []
        return raised[-1] if raised else ""


class ProcessRefusedError(ProcessFailedError, Refusal):
    """A data-plane process ended with a Refusal; the message is its own."""

    def __str__(self) -> str:
        _, found, said = "\n".join(self.tail).rpartition("error: ")
        return said if found else super().__str__()


@dataclass(frozen=True)
class Owner:
    """Who starts processes, and what must not outlive it."""

    name: str
    logs: Path
    folders: tuple[Path, ...] = ()
    """Removed by the supervisors if the starter dies."""
    locks: tuple[int, ...] = ()
    """Descriptors of held locks: they stay held until the supervisors have finished."""


@dataclass
class Process:
    """A running command. Its starter stops it; if the starter dies, the supervisor does."""

    role: str
    log: Path
    grace_s: float
    _supervisor: subprocess.Popen[bytes]
    _descriptor: int
    """pidfd of the supervisor; readable once the supervisor has ended."""
    _read: int
    """Bytes of the log that were already forwarded."""
    _partial: bytes = field(default=b"")
    _reaping: threading.Lock = field(default_factory=threading.Lock)
    """One thread may wait for the end that another one finds."""

    @property
    def pid(self) -> int:
        """Process id of the supervisor."""
        return self._supervisor.pid

    def poll(self) -> int | None:
        """The exit status, 128 + n after signal n, or None while the command runs."""
        with self._reaping:
            if self._has_ended():
                self._reap()
        status = self._supervisor.returncode
        return 128 - status if status is not None and status < 0 else status

    def failure(self, endless: bool = False) -> ProcessFailedError | None:
        """Why the command has ended, if not well; an `endless` one never ends well."""
        status = self.poll()
        if status is None or (status == 0 and not endless):
            return None
        tail = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return (ProcessRefusedError if status == REFUSED else ProcessFailedError)(self.role, status, tail, self.log)

    def check(self) -> bool:
        """Whether the command has ended well; raises ProcessFailedError when it ended otherwise."""
        failure = self.failure()
        if failure is not None:
            raise failure
        return self.poll() == 0

    def new_lines(self) -> list[str]:
        """Whole lines printed since the last call, as a terminal would show them after carriage returns."""
        with self.log.open("rb") as file:
            if self.log.stat().st_size < self._read:  # clean-up has cut the log
                self._read = 0
            file.seek(self._read)
            data = file.read()
        self._read += len(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        shown = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in lines]
        return [line.decode(errors="replace") for line in shown if line.strip()]

    def wait(self, timeout_s: float, on_line: Callable[[str], None] | None = None) -> None:
        """Wait for a good end, handing over printed lines. Raises ProcessFailedError or TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while True:
            ended = self.poll() is not None
            if on_line is not None:
                for line in self.new_lines():
                    on_line(line)
            if ended:
                break
            if time.monotonic() > deadline:
                raise TimeoutError(f"the {self.role} did not end within {timeout_s:g} s; its log is {self.log}")
            self._has_ended(POLL_S)
        self.check()

    def stop(self) -> None:
        """SIGTERM, grace, SIGKILL for the whole group; returns when nothing is left. Idempotent."""
        if self.poll() is not None:
            return
        self._send(signal.SIGTERM)
        if not self._ends(self.grace_s + STOP_MARGIN_S):
            self._send(signal.SIGKILL)
        if not self._ends(STOP_MARGIN_S):
            raise TimeoutError(f"the supervisor of the {self.role}, process {self.pid}, does not die")

    def _send(self, number: signal.Signals) -> None:
        with self._reaping:
            if self._supervisor.returncode is None:
                signal.pidfd_send_signal(self._descriptor, number)

    def _ends(self, timeout_s: float) -> bool:
        """Whether the command ends within a time."""
        deadline = time.monotonic() + timeout_s
        while self.poll() is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._has_ended(min(left, POLL_S))
        return True

    def _has_ended(self, timeout_s: float = 0.0) -> bool:
        """Whether the supervisor ends within a time and waits to be reaped."""
        if self._supervisor.returncode is not None:
            return False
        ending = select.poll()
        ending.register(self._descriptor, select.POLLIN)
        return bool(ending.poll(1000 * timeout_s))

    def _reap(self) -> None:
        """Kill what a killed supervisor left, then let go of its process id, which may be somebody else's from then on.

        In this order: a session is known by its leader's process id, which is nobody else's before it is reaped.
        """
        _kill_session(self._supervisor.pid)
        self._supervisor.wait()
        os.close(self._descriptor)
        if self._supervisor.stdin:
            self._supervisor.stdin.close()


def _kill_session(leader: int) -> None:
    """Kill what a killed supervisor left in its session: its command died with it, the command's children did not."""
    for pid in (int(entry.name) for entry in Path("/proc").glob("[0-9]*")):
        with suppress(ProcessLookupError):
            if pid != leader and os.getsid(pid) == leader:
                os.kill(pid, signal.SIGKILL)


def start(
    role: str,
    command: Sequence[str],
    owner: Owner,
    environment: Mapping[str, str] | None = None,
    grace_s: float = 10.0,
) -> Process:
    """Start `command` under a supervisor with its output appended to `<logs>/<role>.log`."""
    make_folder(owner.logs)
    reach_loopback_directly()
    log = owner.logs / f"{role}.log"
    owned = [f"--owns={folder}" for folder in owner.folders]
    with log.open("ab") as output:
        already = output.tell()
        process = subprocess.Popen(
            [*guard(grace_s), *owned, "--", *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **tools_environment(command[0]), **(environment or {})},
            start_new_session=True,
            pass_fds=owner.locks,
        )
    return Process(role, log, grace_s, process, os.pidfd_open(process.pid), already)


def guard(grace_s: float) -> list[str]:
    """The command line of a supervisor; its other options, `--` and the command follow."""
    # By path and isolated: as a module it would import the package, and site, before it could guard anything.
    return [sys.executable, "-I", "-S", str(Path(supervisor.__file__)), "--grace", str(grace_s)]


def module(name: str, *arguments: str | Path) -> list[str]:
    """The command line that runs a module of this project with this interpreter."""
    return [sys.executable, "-m", name, *map(str, arguments)]
