"""Commands that are one: a trainer's or a server's on several machines, each a process here."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from infra.processes.exit import REFUSED
from infra.processes.process import POLL_S, Process, ProcessFailedError


class Gang:
    """Processes that end well together, and fail together when one of them fails. Its creator stops it."""

    def __init__(self, members: Sequence[Process], led: bool = False) -> None:
        """`members`: the first one prints for all of them; if `led`, the others run until it has ended."""
        self._members, self._led = members, led
        self._failed: Process | None = None
        """Who failed first: the others end because of it."""

    @property
    def log(self) -> Path:
        """The first member's."""
        return self._members[0].log

    def poll(self) -> int | None:
        """0 when all have ended well, the status of the first that has not, or None while they run."""
        statuses = [member.poll() for member in self._members]
        # A leader that ends well after another failed was stopped because of that.
        if self._led and self._failed is None and statuses[0] == 0:
            return 0
        for member, status in zip(self._members, statuses, strict=True):
            if status and self._failed is None:
                self._failed = member
        return self._failed.poll() if self._failed else None if None in statuses else 0

    def failure(self, endless: bool = False) -> ProcessFailedError | None:
        """Why they have ended, if not well: what one of them refuses comes before what failed because of it.

        `endless` is not for gangs.
        """
        assert not endless, "a gang ends"
        status = self.poll()
        refusing = (member for member in self._members if member.poll() == REFUSED)
        first = next(refusing, self._failed) if status else None
        return first.failure() if first else None

    def wait(self, timeout_s: float, on_line: Callable[[str], None]) -> None:
        """Wait for a good end, handing over printed lines. Raises ProcessFailedError or TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while (status := self.poll()) is None and time.monotonic() < deadline:
            for line in self.new_lines():
                on_line(line)
            time.sleep(POLL_S)
        for line in self.new_lines():
            on_line(line)
        if status is None:
            raise TimeoutError(f"the {self._members[0].role} did not end within {timeout_s:g} s; its log is {self.log}")
        failure = self.failure()
        if failure is not None:
            raise failure

    def new_lines(self) -> list[str]:
        """What the first member printed since the last call."""
        return self._members[0].new_lines()

    def stop(self) -> None:
        """Stop them all. Idempotent."""
        with ExitStack() as stack:
            for member in self._members:
                stack.callback(member.stop)
