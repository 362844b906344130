"""The generators' side of the ledger: lease, publish, fail, give back.

Why the budget cannot deadlock
------------------------------
Call a leased or ready row a *holder*, and a pending row below the highest holder a *hole*. In strict order

    I:  bytes of all holders and of taken, unreleased rows  +  exact sizes of all holes  <=  budget

holds after every transaction:

* Lease takes the lowest pending row and never skips. Is that row a hole, its size moves from one term of I to the
  other, so **a hole always fits**. Is it none, there are no holes (they would be lower), I's left side is the bytes
  held, and the lease is made only if they and the new row fit.
* Fail, expiry and give-back turn a holder into at most a hole; publish changes nothing; plan, release, commit and
  quarantine only make terms vanish.
* Resume can break I: rows trained after the surviving checkpoint come back as holes whose bytes were given away long
  ago. It therefore evicts holders from the top until I holds again (infra.ledger.resume), or those rows would wait for
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

import sqlalchemy as sa

from infra.ledger.schema import HOLDS_BYTES, LEASED, PENDING, QUARANTINED, READY, database_now, runs, samples
from infra.ledger.transactions import NOTHING_HELD, Transactions
from infra.records.data_path import Lease, ObjectRecord


def object_key(run: str, epoch: int, ordinal: int, attempt: int) -> str:
    """An object's key. No two leases of a run ever have the same one."""
    return f"{run}/{epoch}/{ordinal}/{attempt}"


class GeneratorSide(Transactions):
    """What generators, and the sweeper of objects, ask of the ledger. `owner` names one generator process."""

    def key(self, lease: Lease) -> str:
        """Key of the object that this lease may write."""
        return object_key(self.run, lease.epoch, lease.ordinal, lease.attempt)

    def lease(self, owner: str, limit: int, has_others: bool = False) -> list[Lease]:
        """Lease up to `limit` samples, lowest (epoch, ordinal) first, as far as the budget goes.

        Expired leases are given back first, and no lease lasts longer than a new one would: one that was granted
        before the database's clock jumped back would otherwise outlive its owner by the jump. Empty when nothing is
        pending, when the next sample does not fit now, or when the run is finished. With `has_others` (other
        generators may capture for this run) also empty when the next sample failed under this owner less than
        `lease_seconds` ago: somebody else is to try it. No sample is ever skipped.
        """
        with self._write() as (connection, run):
            if run.finished:
                return []
            now = connection.execute(sa.select(database_now())).scalar_one()
            latest = now + run.lease_seconds
            self._to_pending(connection, samples.c.state == LEASED, samples.c.lease_expires < now)
            too_long = self._rows(samples.c.state == LEASED, samples.c.lease_expires > latest)
            connection.execute(sa.update(samples).where(too_long).values(lease_expires=latest))
            free = run.budget_bytes - self._held(connection)
            order = (samples.c.epoch, samples.c.ordinal)
            waiting = sa.select(samples).where(self._rows(samples.c.state == PENDING)).order_by(*order).limit(limit)
            leases: list[Lease] = []
            for row in connection.execute(waiting):
                nbytes = row.tokens * run.bytes_per_token
                if nbytes > free or (has_others and row.owner == owner and now < row.lease_expires <= latest):
                    break
                free -= nbytes
                leases.append(
                    Lease(
                        epoch=row.epoch,
                        ordinal=row.ordinal,
                        sample=row.sample,
                        tokens=row.tokens,
                        attempt=row.attempt + 1,
                        nbytes=nbytes,
                    )
                )
            if leases:
                self._write_leases(connection, owner, run.lease_seconds, leases)
            return leases

    def publish(self, lease: Lease, record: ObjectRecord, prefill_s: float = 0.0, put_s: float = 0.0) -> bool:
        """Offer a captured object to the trainer, with the seconds that its prefill and its writing took.

        False when the lease was lost meanwhile: then the caller deletes its own object. Raises ValueError for an
        object of another key or larger than the lease.
        """
        if record.key != self.key(lease) or record.nbytes > lease.nbytes:
            raise ValueError(
                f"object {record.key} of {record.nbytes} bytes does not belong to the lease of {self.key(lease)}, "
                f"{lease.nbytes} bytes: a sample's object is tokens x bytes_per_token under the lease's own key"
            )
        published = {
            "state": READY,
            "object": record.model_dump_json(),
            "lease_expires": None,
            "prefill_s": prefill_s,
            "put_s": put_s,
            "published": database_now(),
        }
        with self._write() as (connection, _):
            change = sa.update(samples).where(self._held_by(lease)).values(**published)
            return connection.execute(change).rowcount == 1

    def fail(self, lease: Lease, error: str) -> None:
        """Record that a sound engine could not capture a sample: it is pending again, or quarantined after
        `max_attempts` failures.

        The row keeps its owner, and until `lease_seconds` have passed `lease` leaves it to others. A lease that was
        lost meanwhile counts for nothing.
        """
        with self._write() as (connection, run):
            failures = samples.c.failures + 1
            failed = NOTHING_HELD | {
                "state": sa.case((failures >= run.max_attempts, QUARANTINED), else_=PENDING),
                "failures": failures,
                "error": error,
                "owner": samples.c.owner,
                "lease_expires": database_now() + run.lease_seconds,
            }
            connection.execute(sa.update(samples).where(self._held_by(lease)).values(**failed))

    def renew(self, owner: str) -> int:
        """Extend all leases that `owner` still has; their number."""
        with self._write() as (connection, run):
            change = sa.update(samples).where(self._rows(samples.c.state == LEASED, samples.c.owner == owner))
            return connection.execute(change.values(lease_expires=database_now() + run.lease_seconds)).rowcount

    def give_back(self, owner: str) -> int:
        """Give all leases of `owner` back, at a clean shutdown or by its successor; their number."""
        with self._write() as (connection, _):
            return self._to_pending(connection, samples.c.state == LEASED, samples.c.owner == owner)

    def finished(self) -> bool:
        """Whether the trainer has committed its last checkpoint, so that a generator may stop."""
        with self._read() as connection:
            return bool(connection.execute(sa.select(runs.c.finished).where(runs.c.name == self.run)).scalar())

    def held_keys(self) -> set[str]:
        """Keys that a row holds, with an object or a lease that may still write one.

        The sweeper deletes every other object. It must list the transport's keys *before* it asks here, or it deletes
        what was leased and written in between.
        """
        query = sa.select(samples.c.epoch, samples.c.ordinal, samples.c.attempt).where(self._rows(), HOLDS_BYTES)
        with self._read() as connection:
            return {object_key(self.run, *row) for row in connection.execute(query)}

    def _held_by(self, lease: Lease) -> sa.ColumnElement[bool]:
        return self._rows(
            samples.c.epoch == lease.epoch,
            samples.c.ordinal == lease.ordinal,
            samples.c.state == LEASED,
            samples.c.attempt == lease.attempt,
        )

    def _write_leases(self, connection: sa.Connection, owner: str, seconds: float, leases: list[Lease]) -> None:
        change = (
            sa.update(samples)
            .where(
                samples.c.run == self.run,
                samples.c.epoch == sa.bindparam("at_epoch"),
                samples.c.ordinal == sa.bindparam("at_ordinal"),
            )
            .values(
                state=LEASED,
                attempt=sa.bindparam("new_attempt"),
                bytes_held=sa.bindparam("new_bytes"),
                owner=owner,
                lease_expires=database_now() + seconds,
            )
        )
        rows = [
            {"at_epoch": x.epoch, "at_ordinal": x.ordinal, "new_attempt": x.attempt, "new_bytes": x.nbytes}
            for x in leases
        ]
        connection.execute(change, rows)
