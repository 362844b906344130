"""What flow and trainer look at again and again: it costs the same however many samples a run has."""

from typing import NamedTuple

import sqlalchemy as sa

from infra.ledger.ledger import Ledger
from infra.ledger.schema import LEASED, NO_STEP, READY, checkpoints, runs, samples


class Pulse(NamedTuple):
    """It differs from an earlier one if a sample was captured, or a step trained, or a checkpoint committed since."""

    incarnation: int
    step: int
    """The one that is trained now."""
    checkpoint: int | None
    captured_at: float | None
    """By the database's clock; None before the first capture."""


def pulse(ledger: Ledger) -> Pulse:
    """Where the run is now."""
    last = ledger.last_capture()
    with ledger.read() as rows:
        query = sa.select(runs.c.incarnation, runs.c.current_step).where(runs.c.name == rows.run)
        run = rows.connection.execute(query).one_or_none()
        newest = rows.scalar(sa.select(sa.func.max(checkpoints.c.step)).where(checkpoints.c.run == rows.run))
    incarnation, step = run or (0, NO_STEP)  # a run's first process enters it
    return Pulse(incarnation, step, newest, last.at if last else None)


def in_flight(ledger: Ledger) -> int:
    """Samples that are captured, or are being captured, and in no step yet."""
    with ledger.read() as rows:
        return rows.scalar(rows.select(sa.func.count()).where(samples.c.state.in_((LEASED, READY))))
