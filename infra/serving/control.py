"""Starts and stops SGLang servers that outlive whoever started them.

A server that the follower starts is known by a variable in its environment, which its children inherit. So a follower
that was killed finds its servers again, those that were not listening yet among them, and no process id has to be kept.
"""

import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from infra.files.atomic import write_atomically
from infra.pools.gpus import named_by_position
from infra.refusal import Refusal
from infra.serving.config import FollowConfig, ServerConfig
from infra.settings import tools_environment

MARK, COMMAND = "DRAFTSMITH_FOLLOWED", "DRAFTSMITH_FOLLOWED_COMMAND"
"""Variables of a server that is followed: whose it is, and the hash of its whole command line."""
RESTART_S = 600.0
METRICS = "--enable-metrics"
LOG_BYTES = 64 * 2**20
"""A log that is longer makes way for a new one at the next start."""


class OwnServer:
    """A server that is started from its command line."""

    def __init__(self, server: ServerConfig, folder: Path) -> None:
        assert server.command is not None, "the command is checked with the settings"
        self._command, self._mark = shlex.split(server.command), f"{folder} {server.url}"
        self._log = folder / "logs" / f"{server.name}.log"
        self._gpus = tuple(map(str, server.gpus))
        self._started: list[subprocess.Popen[bytes]] = []

    def age(self) -> float | None:
        """Seconds since its processes started; None if there are none, or if they cannot be seen."""
        processes = self._processes()
        leaders = [process for process in processes if _leads(process)]
        if processes and not leaders:  # what a killed server left; it is gone when looked at again
            self._signal(processes, signal.SIGKILL)
            return 0.0
        ages = [time.time() - created for process in leaders if (created := _created(process)) is not None]
        return max(ages, default=None)

    def _line(self, arguments: Sequence[str]) -> list[str]:
        return [*self._command, *([] if METRICS in self._command else [METRICS]), *arguments]

    def was_started_with(self, arguments: Sequence[str]) -> bool:
        """Whether what runs was started as the settings and the draft's arguments say now."""
        wanted = self._hash(self._line(arguments))
        for process in self._processes():
            with suppress(psutil.Error):
                if process.environ().get(COMMAND) != wanted:
                    return False
        return True

    def swapped(self, arguments: Sequence[str]) -> None:
        """It runs as if it had been started with these: nothing to keep, its next start is given its arguments."""

    def missing_program(self) -> str | None:
        """The program of its command, if it is not found."""
        program = self._command[0]
        return None if shutil.which(program, path=tools_environment(program).get("PATH")) else program

    def start(self, arguments: Sequence[str]) -> None:
        """Start it with the draft's arguments; it may take minutes until it is healthy."""
        assert not self._processes(), "it runs already"
        line = self._line(arguments)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            if self._log.stat().st_size > LOG_BYTES:
                self._log.replace(self._log.with_suffix(".previous.log"))
        with self._log.open("ab") as output:
            marks = {MARK: self._mark, COMMAND: self._hash(line)}
            environment = {**os.environ, **tools_environment(self._command[0]), **_devices(self._gpus), **marks}
            try:
                process = subprocess.Popen(
                    line,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
            except OSError as error:
                raise Refusal(f"{self._command[0]} cannot be started ({error.strerror}): correct `command`") from error
        self._started.append(process)

    def stop(self) -> bool:
        """Let it finish its requests and end; False where `start` replaces it."""
        self._signal([process for process in self._processes() if _leads(process)], signal.SIGTERM)
        return True

    def kill(self) -> None:
        """End it now."""
        self._signal(self._processes(), signal.SIGKILL)

    def _processes(self) -> list[psutil.Process]:
        self._started = [process for process in self._started if process.poll() is None]
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def _hash(self, line: Sequence[str]) -> str:
        """Of the command line and the GPUs that go with it."""
        return hashlib.sha256("\0".join((*self._gpus, *line)).encode()).hexdigest()[:16]

    @staticmethod
    def _signal(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)


def _devices(gpus: Sequence[str]) -> dict[str, str]:
    """The variables that give a process these GPUs, by position where that is known: SGLang reads some as numbers."""
    if not gpus:
        return {}
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": ",".join(gpus)} | named_by_position(gpus)


def _leads(process: psutil.Process) -> bool:
    """Whether it is the process that was started: servers get a session of their own."""
    try:
        return os.getsid(process.pid) == process.pid
    except ProcessLookupError:
        return False


def _created(process: psutil.Process) -> float | None:
    try:
        return process.create_time()
    except psutil.NoSuchProcess:
        return None


class RestartedServer:
    """A server of another supervisor, which a command restarts with the arguments in a file."""

    def __init__(self, server: ServerConfig, folder: Path) -> None:
        assert server.restart is not None, "the command is checked with the settings"
        self._command, self._file = shlex.split(server.restart), folder / "servers" / f"{server.name}.env"
        self._log = folder / "logs" / f"{server.name}.restart.log"

    def age(self) -> float | None:
        """Since the last restart."""
        try:
            return time.time() - self._file.stat().st_mtime
        except FileNotFoundError:
            return None

    def was_started_with(self, arguments: Sequence[str]) -> bool:
        """By the file; a server that was never restarted from here is as it is."""
        return not self._file.is_file() or self._file.read_text() == _variables(arguments)

    def swapped(self, arguments: Sequence[str]) -> None:
        write_atomically(self._file, _variables(arguments))

    def start(self, arguments: Sequence[str]) -> None:
        if any(" " in argument or not argument.isprintable() for argument in arguments):  # no new line is printable
            raise Refusal(
                f"{self._file}: arguments with spaces or line breaks cannot be told apart there: choose another "
                "`folder`, and `arguments` without them"
            )
        write_atomically(self._file, _variables(arguments))
        self._log.parent.mkdir(parents=True, exist_ok=True)
        try:
            # Into a file: a server that the command leaves behind would hold a pipe open.
            with self._log.open("wb") as output:
                subprocess.run(
                    self._command,
                    check=True,
                    timeout=RESTART_S,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
        except OSError as error:
            raise Refusal(f"{self._command[0]} cannot be started ({error.strerror}): correct `restart`") from error

    def stop(self) -> bool:
        return False

    def kill(self) -> None:
        """Its own supervisor restarts it; the next start does so with the right arguments."""


def _variables(arguments: Sequence[str]) -> str:
    return f"DRAFT_ARGUMENTS={' '.join(arguments)}\n"


ServerControl = OwnServer | RestartedServer
"""How one server is started and stopped."""


def control_of(server: ServerConfig, config: FollowConfig) -> ServerControl:
    """How a server is started and stopped."""
    kind = OwnServer if server.command is not None else RestartedServer
    return kind(server, Path(config.folder))
