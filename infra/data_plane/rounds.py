"""The generators' turn where both sides have the same devices: capture until a round is full, then stop."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from infra.data_plane.watch import StallError, blame
from infra.ledger.ledger import Ledger
from infra.ledger.rounds import round_is_captured
from infra.processes.keep_running import POLL_S, Generators, KeptProcess, OnLine, tend
from infra.quantities import byte_size

TELL_S = 15.0


def follow_capture(
    ledger: Ledger,
    starts: Sequence[Callable[[], KeptProcess]],
    on_line: OnLine,
    on_event: OnLine,
    check: Callable[[], None],
    services: Sequence[KeptProcess] = (),
) -> None:
    """Start a generator by each of `starts`, tend them until the round is captured, and stop them.

    Raises StallError where there is nothing to capture although the trainer could not go on, ProcessFailedError for
    a service, or the last generator, that cannot be started any more, and what `check` raises, called at every poll.
    """
    with ExitStack() as stack:
        if round_is_captured(ledger):
            raise StallError(f"neither generators nor trainer can go on: {blame(ledger)}")
        generators = Generators()
        for start in starts:
            kept = start()
            stack.callback(kept.close)
            generators.going.append(kept)
        on_line("capture: the generators' turn")
        told = time.monotonic()
        while not round_is_captured(ledger):
            tend(generators, services, on_line, on_event)
            check()
            if time.monotonic() - told > TELL_S:
                told = time.monotonic()
                on_line(f"capture: {_captured(ledger)}")
            time.sleep(POLL_S)
        on_line(f"capture: {_captured(ledger)}: the trainer's turn")


def _captured(ledger: Ledger) -> str:
    states = ledger.progress()
    left = states.pending + states.leased
    return f"{states.ready} samples ({byte_size(states.bytes_held)}) are captured, {left} of the epoch are left"
