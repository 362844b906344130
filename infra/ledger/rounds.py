"""Rounds: generators capture until the budget is full, then the trainer trains all of it, on the same devices.

Samples of a round keep their bytes until the checkpoint that holds them is committed, so a trainer that crashes finds
all of them again, and no engine has to start in between. Every round trains at least one step: when nothing is leased
and the next pending sample does not fit, the samples of the next step are ready (infra.ledger.generators).
"""

import sqlalchemy as sa

from infra.ledger.generators import PLACE
from infra.ledger.ledger import Ledger
from infra.ledger.schema import CONSUMED, HOLDS_BYTES, LEASED, PENDING, runs, samples


def round_is_captured(ledger: Ledger) -> bool:
    """Whether generators have nothing left to do: no sample is leased, and the next one, if any, does not fit."""
    with ledger.read() as rows:
        if rows.scalar(rows.select(samples.c.sample).where(samples.c.state == LEASED).limit(1)) is not None:
            return False
        pending = rows.select(samples.c.tokens).where(samples.c.state == PENDING).order_by(*PLACE).limit(1)
        tokens = rows.scalar(pending)
        if tokens is None:
            return True
        held = rows.scalar(rows.select(sa.func.sum(samples.c.bytes_held)).where(HOLDS_BYTES)) or 0
        query = sa.select(runs.c.budget_bytes, runs.c.bytes_per_token).where(runs.c.name == rows.run)
        ((budget, bytes_per_token),) = rows.all(query)
        return tokens * bytes_per_token > budget - int(held)


def free_consumed(ledger: Ledger, incarnation: int) -> None:
    """Give back the bytes of all samples that a committed checkpoint holds; the sweeper then deletes their objects."""
    with ledger.write(incarnation) as (rows, _):
        rows.update(samples.c.state == CONSUMED, HOLDS_BYTES, bytes_held=0, object=None)


def trainer_has_turn(ledger: Ledger) -> bool:
    """Whether a trainer has taken the run over and neither ended its turn nor finished."""
    with ledger.read() as rows:
        return bool(rows.scalar(sa.select(runs.c.training).where(runs.c.name == rows.run)))
