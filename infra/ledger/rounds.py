"""Rounds: generators capture until the budget is full, then the trainer trains all of it, on the same devices.

Samples of a round keep their bytes until the checkpoint that holds them is committed, so a trainer that crashes finds
all of them again, and no engine has to start in between. Every round trains at least one step: when nothing is leased
and the next pending sample does not fit, the samples of the next step are ready (infra.ledger.generators).
"""

import sqlalchemy as sa

from infra.ledger.generators import may_lease
from infra.ledger.ledger import Ledger
from infra.ledger.schema import CONSUMED, HOLDS_BYTES, LEASED, runs, samples


def round_is_captured(ledger: Ledger) -> bool:
    """Whether generators have nothing left to do: no sample is leased, and the next one, if any, does not fit."""
    with ledger.read() as rows:
        if rows.scalar(rows.select(samples.c.sample).where(samples.c.state == LEASED).limit(1)) is not None:
            return False
        return not may_lease(rows, rows.run_row())


def free_consumed(ledger: Ledger, incarnation: int) -> None:
    """Give back the bytes of all samples that a committed checkpoint holds; the sweeper then deletes their objects."""
    with ledger.write(incarnation) as (rows, _):
        rows.update(samples.c.state == CONSUMED, HOLDS_BYTES, bytes_held=0, object=None)


def trainer_has_turn(ledger: Ledger) -> bool:
    """Whether a trainer has taken the run over and neither ended its turn nor finished."""
    with ledger.read() as rows:
        return bool(rows.scalar(sa.select(runs.c.training).where(runs.c.name == rows.run)))
