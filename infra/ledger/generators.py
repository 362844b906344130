"""The generators' side of the ledger: lease, publish, fail, give back.

Why the budget cannot deadlock
------------------------------
Call a leased or ready row a *holder*, and a pending row below the highest holder a *hole*. In strict order

    I:  bytes of all holders and of taken, unreleased rows  +  exact sizes of all holes  <=  budget

holds after every transaction:

* Lease takes the lowest pending row and never skips. Is that row a hole, its size moves from one term of I to the
  other, so **a hole always fits**. Is it none, there are no holes (they would be lower), I's left side is the bytes
  held, and the lease is made only if they and the new row fit.
* An exchange publishes and then leases: the two in turn, in one transaction.
* Fail, expiry and give-back turn a holder into at most a hole; publish changes nothing, or lowers a term to what an
  answer really takes; plan, release, commit and quarantine only make terms vanish.
* Resume can break I: rows trained after the surviving checkpoint come back as holes whose bytes were given away long
  ago. It therefore evicts holders from the top until I holds again (`evict`), or those rows would wait for
  ever for bytes that later rows hold, and the later rows for the trainer.

Let the trainer wait for the step made of the first n remaining rows. Ranks copy out and release what is already taken
without waiting for generators, so the taken term becomes 0. Let x be the lowest pending row of the step. A hole fits.
If x is no hole, all holders are below x and so belong to this step: what they hold, and x, fit if the whole step fits
in the budget, which `check_budget` demands. So x is leased: at once, or, where the only generator that asks is the one
in which x has just failed, when `lease_seconds` have passed. Each of its captures publishes, or fails or expires and x
is leased again; failures end in quarantine after `max_attempts`. Hence every step becomes ready.

What may fail
-------------
Only a sample that an engine cannot capture although its canary passes right after it counts as failed (`fail`). A
generator whose engine, disk, device, network or database fails ends instead, gives its leases back, and is started
again: no row changes but its lease. A failed sample is offered to the other generators first, so it is quarantined on
the word of two of them wherever another one lives, and of one that tried it twice where none does.

In `any` order the trainer waits only while fewer than n rows are ready. If no lease is out either, the lowest pending
row and those ready ones are at most n rows, which fit; so it is leased. I is not needed.
"""

import json
from collections.abc import Sequence
from typing import NamedTuple, Self

import sqlalchemy as sa

from infra.ledger.schema import HOLDS_BYTES, LEASED, PENDING, READY, REMAINING, Rows, database_now, samples
from infra.records.data_path import Lease, ObjectRecord

PLACE = (samples.c.epoch, samples.c.ordinal)
"""The order in which samples are leased."""


class Publication(NamedTuple):
    """A captured object, written under its lease."""

    lease: Lease
    record: ObjectRecord
    prefill_s: float = 0.0
    put_s: float = 0.0
    """Seconds of the write."""
    answer: tuple[int, ...] | None = None
    """What the target answered while the sample was captured: the tokens that follow its prompt."""


class Exchange(NamedTuple):
    """What a generator gets for its captures."""

    lost: list[Publication]
    """Those whose lease was lost meanwhile: the generator deletes their objects."""
    leases: list[Lease]
    finished: bool
    """The trainer has committed its last checkpoint: the generator may end."""


class Room(NamedTuple):
    """What decides whether a sample can be leased, in one round trip."""

    now: float
    free: int
    """Bytes of the budget."""
    has_ended: bool
    """A lease has expired, or lasts longer than a new one would: then it is from before the database's clock jumped
    back, and would outlive its owner by the jump."""

    @classmethod
    def of(cls, rows: Rows, run: sa.Row) -> Self:
        now, expires = database_now(), samples.c.lease_expires
        held = rows.select(sa.func.coalesce(sa.func.sum(samples.c.bytes_held), 0)).where(HOLDS_BYTES)
        ended = rows.select(sa.literal(True)).where(
            samples.c.state == LEASED, (expires < now) | (expires > now + run.lease_seconds)
        )
        columns = (now, held.scalar_subquery(), ended.exists())
        ((at, nbytes, has_ended),) = rows.all(sa.select(*columns))
        return cls(at, run.budget_bytes - int(nbytes), bool(has_ended))


def may_lease(rows: Rows, run: sa.Row) -> bool:
    """Whether `lease` could have something to give, from a snapshot: an idle generator does not queue for the lock."""
    room = Room.of(rows, run)
    tokens = rows.scalar(rows.first(PENDING, samples.c.tokens, limit=1))
    return room.has_ended or (tokens is not None and tokens * run.bytes_per_token <= room.free)


def lease(rows: Rows, run: sa.Row, owner: str, limit: int, has_others: bool) -> list[Lease]:
    """Lease the first pending samples that fit (see `Ledger.exchange`)."""
    room = Room.of(rows, run)
    latest = room.now + run.lease_seconds
    if room.has_ended:
        rows.give_back(samples.c.state == LEASED, samples.c.lease_expires < room.now)
        rows.update(samples.c.state == LEASED, samples.c.lease_expires > latest, lease_expires=latest)
        room = Room.of(rows, run)
    free = room.free
    leases: list[Lease] = []
    for row in rows.all(rows.first(PENDING, samples, limit=limit)):
        nbytes = row.tokens * run.bytes_per_token
        if nbytes > free or (has_others and row.owner == owner and room.now < row.lease_expires <= latest):
            break
        free -= nbytes
        place = {"epoch": row.epoch, "ordinal": row.ordinal, "sample": row.sample, "tokens": row.tokens}
        answer = answer_of(row)
        leases.append(Lease(**place, attempt=row.attempt + 1, nbytes=nbytes, answer=answer))
    if leases:
        rows.update(
            samples.c.state == PENDING,
            # None was skipped: these are all that are pending up to the last one.
            sa.tuple_(*PLACE) <= sa.tuple_(sa.literal(leases[-1].epoch), sa.literal(leases[-1].ordinal)),
            state=LEASED,
            attempt=samples.c.attempt + 1,
            bytes_held=sa.cast(samples.c.tokens, sa.BigInteger) * run.bytes_per_token,
            owner=owner,
            lease_expires=database_now() + run.lease_seconds,
        )
    return leases


def publish(rows: Rows, run: sa.Row, publications: Sequence[Publication]) -> list[Publication]:
    """Make leased samples ready, in two statements; those whose lease was lost.

    An answer is kept for as long as the row: whoever captures the sample again captures the same text.
    """
    if not publications:
        return []
    # This transaction holds the run's row, so what is leased now stays so. Epochs and ordinals may pair otherwise.
    epochs, ordinals = ({getattr(one.lease, name) for one in publications} for name in ("epoch", "ordinal"))
    query = rows.select(*PLACE, samples.c.attempt).where(samples.c.state == LEASED)
    leased = set(map(tuple, rows.all(query.where(samples.c.epoch.in_(epochs), samples.c.ordinal.in_(ordinals)))))
    held = [(one.lease.epoch, one.lease.ordinal, one.lease.attempt) in leased for one in publications]
    rows.update_each(
        [_published(one, run) for one, is_held in zip(publications, held, strict=True) if is_held],
        state=READY,
        lease_expires=None,
        published=database_now(),
    )
    return [one for one, is_held in zip(publications, held, strict=True) if not is_held]


def _published(publication: Publication, run: sa.Row) -> dict[str, object]:
    """What a publication says of its sample."""
    lease, nbytes = publication.lease, publication.lease.nbytes
    if publication.answer is not None:
        # It may be shorter than what was kept for it.
        nbytes = publication.record.nbytes
    answer = lease.answer if publication.answer is None else publication.answer
    return {
        "epoch": lease.epoch,
        "ordinal": lease.ordinal,
        "answer": None if answer is None else json.dumps(answer),
        "tokens": nbytes // run.bytes_per_token,
        "bytes_held": nbytes,
        "object": publication.record.model_dump_json(),
        "prefill_s": publication.prefill_s,
        "put_s": publication.put_s,
    }


def answer_of(row: sa.Row) -> tuple[int, ...] | None:
    """The answer that a row keeps."""
    return None if row.answer is None else tuple(json.loads(row.answer))


def answers_before(rows: Rows, epoch: int) -> dict[int, dict[str, object]]:
    """By sample, the answers of the epoch before this one, which has those of all earlier ones, and their tokens."""
    before = rows.scalar(rows.select(sa.func.max(samples.c.epoch)).where(samples.c.epoch < epoch))
    query = rows.select(samples.c.sample, samples.c.answer, samples.c.tokens)
    found = rows.all(query.where(samples.c.epoch == before, samples.c.answer.is_not(None)))
    return {row.sample: {"answer": row.answer, "tokens": row.tokens} for row in found}


def evict(rows: Rows, run: sa.Row) -> None:
    """Make invariant I true again.

    What holds bytes beyond the point at which all remaining samples up to it exceed the budget goes back.
    """
    # Cast, or PostgreSQL takes the budget for a number of the tokens' type, which ends at 2 GiB.
    upto = sa.cast(sa.func.sum(samples.c.tokens).over(order_by=PLACE), sa.BigInteger).label("upto")
    remaining = rows.select(*PLACE, upto).where(samples.c.state.in_(REMAINING)).subquery()
    beyond = sa.select(remaining.c.epoch, remaining.c.ordinal).where(
        remaining.c.upto * run.bytes_per_token > run.budget_bytes
    )
    rows.give_back(HOLDS_BYTES, sa.tuple_(*PLACE).in_(beyond))


def held_by(lease: Lease) -> tuple[sa.ColumnElement[bool], ...]:
    """Conditions of the row that this lease still holds."""
    columns = (samples.c.epoch, samples.c.ordinal, samples.c.attempt, samples.c.state)
    values = (lease.epoch, lease.ordinal, lease.attempt, LEASED)
    return tuple(column == value for column, value in zip(columns, values, strict=True))
