"""Hidden states that are gone from the store, or damaged, while a trainer waits for them: they are captured again.

In strict order only. A planned sample that becomes pending again is the lowest of all: its bytes have become free, so
it fits, and nobody leases anything before it (infra.ledger.generators). No step is planned meanwhile.
"""

from collections.abc import Callable, Container

from infra.ledger.ledger import Ledger
from infra.ledger.schema import QUARANTINED, READY, TAKEN, samples
from infra.records.data_path import ObjectRecord, PlannedSample


class RecaptureError(Exception):
    """A sample that was lost cannot be captured again."""


def lose(ledger: Ledger, incarnation: int, key: str, present: Callable[[], Container[str]]) -> int:
    """Make the sample pending whose object has this key, and those that are ready and not `present`; their number.

    `present` lists the store's keys. It is asked after the ledger, so an object that is written meanwhile stays.
    """
    columns = (samples.c.epoch, samples.c.ordinal, samples.c.attempt, samples.c.state, samples.c.object)
    held = (samples.c.state.in_((READY, TAKEN)), samples.c.object.is_not(None))
    with ledger.read() as rows:
        there = [
            (row, ObjectRecord.model_validate_json(row.object).key)
            for row in rows.all(rows.select(*columns).where(*held))
        ]
    keys = present()
    gone = [row for row, its in there if its == key or (row.state == READY and its not in keys)]
    with ledger.write(incarnation) as (rows, _):
        return sum(
            rows.give_back(
                samples.c.epoch == row.epoch,
                samples.c.ordinal == row.ordinal,
                samples.c.attempt == row.attempt,
                samples.c.state == row.state,
            )
            for row in gone
        )


def take_again(ledger: Ledger, incarnation: int, planned: PlannedSample, step: int, gone: str) -> ObjectRecord | None:
    """The new object of a planned sample whose object `gone` was lost, taken for its step; None while it is captured.

    Every rank that reads the sample may ask. Raises RecaptureError where the sample has failed too often.
    """
    here = (samples.c.epoch == planned.epoch, samples.c.ordinal == planned.ordinal)
    with ledger.read() as rows:
        (row,) = rows.all(rows.select(samples.c.state, samples.c.object, samples.c.error).where(*here))
    if row.state == QUARANTINED:
        raise RecaptureError(f"sample {planned.sample} cannot be captured again: {row.error}")
    record = ObjectRecord.model_validate_json(row.object) if row.state in (READY, TAKEN) else None
    if record is None or record.key == gone:
        return None
    with ledger.write(incarnation) as (rows, _):
        rows.update(*here, samples.c.state == READY, state=TAKEN, step=step)
    return record
