"""Restarts crashed data-plane commands with exponential back-off, up to a limit.

The starter restarts, not the supervisor: a supervisor can be killed too, and then this is who notices.
"""

import time
from collections.abc import Callable, Sequence

from infra.processes.exit import REFUSED
from infra.processes.gang import Gang
from infra.processes.process import Process, ProcessFailedError

RESTARTS = 5
BACKOFF_S = 1.0
"""Wait before the first restart; it doubles with each one."""
STEADY_S = 600.0
"""A command that ran for this long gets its full number of restarts again."""
POLL_S = 0.2

OnLine = Callable[[str], None]


class KeptProcess:
    """A command that is restarted when it crashes. Its creator stops it."""

    def __init__(
        self,
        launch: Callable[[], Process | Gang],
        restarts: int = RESTARTS,
        backoff_s: float = BACKOFF_S,
        running: Process | None = None,
        endless: bool = False,
    ):
        """`running`: the process, if the command is launched already; `endless`: any end of it is a crash."""
        self._launch, self._restarts, self._backoff_s, self._endless = launch, restarts, backoff_s, endless
        self._crashes = 0
        self.failure: ProcessFailedError | None = None
        """Why it is not started any more."""
        self._start(running)

    def _start(self, running: Process | None = None) -> None:
        self.process: Process | Gang = running or self._launch()
        self._started = time.monotonic()
        self._start_at: float | None = None

    def tend(self, on_line: OnLine, on_event: OnLine) -> bool:
        """Forward what was printed, start again what has crashed; whether the command has ended well.

        Sets `failure` when the command refused its input (exit status 2) or crashed once too often.
        """
        if self.failure is not None:
            return False
        if self._start_at is not None:
            if time.monotonic() >= self._start_at:
                self._start()
            return False
        status = self.process.poll()
        for line in self.process.new_lines():
            on_line(line)
        if status or (status == 0 and self._endless):
            self._crashed(on_event)
            return False
        return status == 0

    def _crashed(self, on_event: OnLine) -> None:
        self.process.stop()
        error = self.process.failure(self._endless)
        assert error is not None
        if time.monotonic() - self._started > STEADY_S:
            self._crashes = 0
        if error.exit_code == REFUSED or self._crashes == self._restarts:
            self.failure = error
            return
        wait_s = self._backoff_s * 2**self._crashes
        self._crashes += 1
        self._start_at = time.monotonic() + wait_s
        said = f"{error.headline} ({error.cause})" if error.cause else error.headline
        on_event(f"{said}; restart {self._crashes} of {self._restarts} in {wait_s:g} s")

    def close(self) -> None:
        """Stop the command; returns when nothing of it is left. Idempotent."""
        self.process.stop()


class Generators:
    """The generators of one trainer. One that fails for good is left out while others remain."""

    def __init__(self, going: Sequence[KeptProcess] = ()):
        self.going = list(going)

    def tend(self, on_line: OnLine, on_event: OnLine) -> None:
        """Start again what has crashed. Raises ProcessFailedError when the last one cannot be started any more.

        `on_line` receives normal output; `on_event` receives crashes and restarts.
        """
        for generator in list(self.going):
            generator.tend(_nothing, on_event)
            if generator.failure is not None:
                self.going.remove(generator)
                self._failed(generator, generator.failure, on_event)

    def _failed(self, _generator: KeptProcess, failure: ProcessFailedError, on_event: OnLine) -> None:
        if not self.going:
            raise failure
        on_event(f"{failure.headline} and is left out; still going: {len(self.going)}")


def _nothing(_line: str) -> None:
    """Generators have their own logs."""


def follow(
    trainer: KeptProcess,
    generators: Generators,
    on_line: OnLine,
    on_event: OnLine,
    checks: Sequence[Callable[[], None]] = (),
    services: Sequence[KeptProcess] = (),
) -> None:
    """Tend trainer, generators and the services that both need until the trainer has ended well.

    Raises ProcessFailedError for the trainer, a service, or the last generator, that cannot be started any more.
    `checks` are called at every poll.
    """
    while True:
        tend(generators, services, on_line, on_event)
        ended = trainer.tend(on_line, on_event)
        if trainer.failure is not None:
            raise trainer.failure
        for check in checks:
            check()
        if ended:
            return
        time.sleep(POLL_S)


def tend(generators: Generators, services: Sequence[KeptProcess], on_line: OnLine, on_event: OnLine) -> None:
    """Start again what has crashed. Raises ProcessFailedError for a service, or the last generator, that cannot be."""
    generators.tend(on_line, on_event)
    for service in services:
        service.tend(_nothing, on_event)
        if service.failure is not None:
            raise service.failure
