"""The ledger of a run: the durable record of every sample's state. Opened once by every process of the run.

`pending -> leased -> ready -> taken -> consumed`, or `quarantined`. The flow creates the run, the trainer opens epochs,
plans and commits, generators lease and publish, and anybody may ask for progress. A trainer names its incarnation in
each write, which raises StaleIncarnation once another trainer has resumed the run.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Self

import sqlalchemy as sa

from infra.ledger import generators
from infra.ledger.answers import LastCapture, Oldest, Quarantined
from infra.ledger.database import lock_schema, open_engine
from infra.ledger.generators import Exchange, Publication
from infra.ledger.schema import (
    CONSUMED,
    HAS_FAILED,
    HOLDS_BYTES,
    LEASED,
    NO_STEP,
    NOTHING_HELD,
    PENDING,
    QUARANTINED,
    REMAINING,
    TAKEN,
    Rows,
    checkpoints,
    database_now,
    runs,
    samples,
)
from infra.records.data_path import CaptureRates, CheckpointRecord, Lease, Ranges, SampleProgress, SampleSlot
from infra.refusal import Refusal

OPENED = 20_000
"""Samples that are entered in one transaction: generators wait for its end."""


class StaleIncarnation(Refusal):
    """A newer trainer has resumed this run. The caller must stop and write nothing more."""


class Ledger:
    """One process's connection to one run's ledger. Threads may share it; a forked child may not."""

    def __init__(self, engine: sa.Engine, run: str) -> None:
        self._engine, self.run = engine, run
        level = {"isolation_level": "REPEATABLE READ"} if engine.dialect.name == "postgresql" else {}
        self._reader = engine.execution_options(reads=True, **level)

    @classmethod
    def open(cls, url: str, run: str) -> Self:
        """Connect to the database at `url` (SQLAlchemy), making its tables where they are missing.

        Raises Refusal as `open_engine` does, and for a run name that cannot begin an object's key.
        """
        if not run or "/" in run:
            raise Refusal(f"run name {run!r} begins the keys of objects: it must not be empty or hold a slash")
        return cls(open_engine(url), run)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections to the database."""
        self._engine.dispose()

    @contextmanager
    def write(self, incarnation: int | None = None) -> Iterator[tuple[Rows, sa.Row[Any]]]:
        """A transaction that holds the run's row: writers of a run take turns, so sums over its rows are exact.

        A trainer names its incarnation; raises StaleIncarnation when another trainer has resumed since.
        """
        with self._engine.begin() as connection:
            rows = Rows(connection, self.run)
            row = rows.run_row(locked=True)
            if incarnation is not None and incarnation != row.incarnation:
                raise StaleIncarnation(
                    f"run {self.run!r} belongs to trainer incarnation {row.incarnation}; this is {incarnation}"
                )
            yield rows, row

    @contextmanager
    def read(self) -> Iterator[Rows]:
        """One snapshot, which PostgreSQL by default renews with each statement; never waits for writers."""
        with self._reader.begin() as connection:
            yield Rows(connection, self.run)

    # Runs and epochs ------------------------------------------------------------------------------------------------

    def create_run(
        self,
        *,
        budget_bytes: int,
        bytes_per_token: int,
        lease_seconds: float,
        max_attempts: int,
        order: Literal["strict", "any"],
    ) -> None:
        """Enter the run. Where it is there, its budget may grow. Raises Refusal for other values than it has."""
        values = {
            "budget_bytes": budget_bytes,
            "bytes_per_token": bytes_per_token,
            "lease_seconds": float(lease_seconds),
            "max_attempts": max_attempts,
            "plan_order": order,
        }
        if min(budget_bytes, bytes_per_token, lease_seconds, max_attempts) <= 0:
            raise Refusal(f"the ledger's values must be positive: {values}")
        with self._engine.begin() as connection:
            lock_schema(connection)
            row = connection.execute(sa.select(runs).where(runs.c.name == self.run)).mappings().one_or_none()
            if row is None:
                connection.execute(sa.insert(runs).values(name=self.run, **values))
                return
            grows = row["budget_bytes"] < budget_bytes
            others = [f"{n}: {row[n]} there, {v} here" for n, v in values.items() if row[n] != v][grows:]
            if grows and not others:
                connection.execute(sa.update(runs).where(runs.c.name == self.run).values(budget_bytes=budget_bytes))
        if others:
            raise Refusal(
                f"run {self.run!r} is in the ledger with other values ({'; '.join(others)}): resume it with its own "
                "recipe, or start a run of another name"
            )

    def delete_run(self) -> int:
        """Remove the run with all its rows, for a run whose folder goes; the number of sample rows. Idempotent."""
        with self._engine.begin() as connection:
            # The run's row last: the others refer to it.
            names = (samples.c.run, checkpoints.c.run, runs.c.name)
            counts = [connection.execute(sa.delete(name.table).where(name == self.run)).rowcount for name in names]
            return counts[0]

    def open_epoch(self, incarnation: int | None, epoch: int, slots: Sequence[SampleSlot]) -> None:
        """Enter one row per sample, `OPENED` at a time; those already there stay as they are.

        Generators may lease the first ones meanwhile. A trainer names its incarnation; None is for whoever opens the
        first epoch before any trainer. A sample that was quarantined in another epoch is quarantined in this one too,
        and one that was answered keeps its answer. Raises Refusal for slots that differ from the rows that are there,
        and for an epoch before one already open.
        """
        wanted = sorted(slots, key=lambda slot: slot.ordinal)
        with self.read() as rows:
            last = rows.scalar(rows.select(sa.func.max(samples.c.ordinal)).where(samples.c.epoch == epoch))
            if len({slot.ordinal for slot in wanted}) < len(wanted) or (last is not None and last > wanted[-1].ordinal):
                raise _other_samples(rows, epoch)
            # The epochs before are at their end: nothing is answered or quarantined in them any more.
            quarantined = rows.select(samples.c.sample, samples.c.error).where(samples.c.state == QUARANTINED)
            errors = {row.sample: row.error for row in rows.all(quarantined)}
            answers = generators.answers_before(rows, epoch)
        for first in range(0, len(wanted), OPENED):
            with self.write(incarnation) as (rows, run):
                rows.insert(
                    {
                        "epoch": epoch,
                        "attempt": run.attempt_floor,
                        "state": QUARANTINED if slot.sample in errors else PENDING,
                        "error": errors.get(slot.sample),
                        "answer": None,
                        **slot.model_dump(),
                        **answers.get(slot.sample, {}),
                    }
                    for slot in _missing(rows, epoch, wanted[first : first + OPENED])
                )

    # What generators ask: `owner` names one of their processes ------------------------------------------------------

    def key(self, lease: Lease) -> str:
        """Key of the object that this lease may write. No two leases of a run ever have the same one."""
        return f"{self.run}/{lease.epoch}/{lease.ordinal}/{lease.attempt}"

    def exchange(self, owner: str, publications: Sequence[Publication], limit: int, has_others: bool) -> Exchange:
        """Offer captured objects to the trainer and lease up to `limit` samples more, in one transaction.

        All are published, or none if it fails. Raises ValueError for an object of another key or larger than its lease.
        Leases are for the lowest (epoch, ordinal) first, as far as the budget goes. Expired leases are given back
        before. There are none when nothing is pending, when the next sample does not fit now, or when the run is
        finished. With `has_others` (other generators may capture for this run) also when the next sample failed under
        this owner less than `lease_seconds` ago: somebody else is to try it. No sample is ever skipped.
        """
        for lease, record, *_ in publications:
            if record.key != self.key(lease) or record.nbytes > lease.nbytes:
                raise ValueError(
                    f"object {record.key} of {record.nbytes} bytes does not belong to the lease of {self.key(lease)}, "
                    f"{lease.nbytes} bytes: a sample's object is tokens x bytes_per_token under the lease's own key"
                )
        if not publications:
            with self.read() as rows:
                run = rows.run_row()
                if run.finished or not limit or not generators.may_lease(rows, run):
                    return Exchange([], [], run.finished)
        with self.write() as (rows, run):
            lost = generators.publish(rows, run, publications)
            leases = generators.lease(rows, run, owner, limit, has_others) if limit and not run.finished else []
            return Exchange(lost, leases, run.finished)

    def lease(self, owner: str, limit: int, has_others: bool = False) -> list[Lease]:
        """An exchange that publishes nothing; its leases."""
        return self.exchange(owner, (), limit, has_others).leases

    def publish(self, *publications: Publication) -> list[Publication]:
        """An exchange that asks for no leases; those whose lease was lost."""
        return self.exchange("", publications, 0, has_others=False).lost

    def fail(self, lease: Lease, error: str) -> None:
        """Record that a sound engine could not capture a sample: it is pending again, or quarantined after
        `max_attempts` failures.

        The row keeps its owner, and until `lease_seconds` have passed `lease` leaves it to others. A lease that was
        lost meanwhile counts for nothing.
        """
        with self.write() as (rows, run):
            failures = samples.c.failures + 1
            failed = NOTHING_HELD | {
                "state": sa.case((failures >= run.max_attempts, QUARANTINED), else_=PENDING),
                "failures": failures,
                "error": error,
                "owner": samples.c.owner,
                "lease_expires": database_now() + run.lease_seconds,
            }
            rows.update(*generators.held_by(lease), **failed)

    def renew(self, owner: str) -> int:
        """Extend all leases that `owner` still has; their number."""
        with self.write() as (rows, run):
            expires = database_now() + run.lease_seconds
            return rows.update(samples.c.state == LEASED, samples.c.owner == owner, lease_expires=expires)

    def give_back(self, owner: str) -> int:
        """Give all leases of `owner` back, at a clean shutdown or by its successor; their number."""
        with self.write() as (rows, _):
            return rows.give_back(samples.c.state == LEASED, samples.c.owner == owner)

    def finished(self) -> bool:
        """Whether the trainer has committed its last checkpoint, so that a generator may stop."""
        with self.read() as rows:
            return bool(rows.scalar(sa.select(runs.c.finished).where(runs.c.name == self.run)))

    def held_keys(self) -> set[str]:
        """Keys that a row holds, with an object or a lease that may still write one.

        The sweeper deletes every other object. It must list the transport's keys *before* it asks here, or it deletes
        what was leased and written in between.
        """
        with self.read() as rows:
            query = rows.select(samples.c.epoch, samples.c.ordinal, samples.c.attempt).where(HOLDS_BYTES)
            return {f"{self.run}/{row.epoch}/{row.ordinal}/{row.attempt}" for row in rows.all(query)}

    # What a trainer writes, beside resuming and planning (infra.ledger.trainers) ------------------------------------

    def forget_crashes(self) -> None:
        """Reset the count of trainer crashes; nothing happens where the run was never created."""
        with self._engine.begin() as connection:
            Rows(connection, self.run).update_run(training=False)

    def reopen(self) -> None:
        """Reopen a finished run: no generator ends before a trainer has finished again.

        Its newest checkpoint may turn out to be damaged, and generators that had ended by then would capture nothing.
        """
        with self._engine.begin() as connection:
            Rows(connection, self.run).update_run(finished=False)

    def release(self, incarnation: int, epoch: int, *ordinals: int) -> None:
        """Free the bytes of samples whose objects this rank has copied out **and deleted**. Their state stays."""
        there = (samples.c.epoch == epoch, samples.c.ordinal.in_(ordinals), samples.c.state.in_((TAKEN, CONSUMED)))
        with self.write(incarnation) as (rows, _):
            released = rows.update(*there, bytes_held=0, object=None)
            assert released == len(set(ordinals)), f"release of samples that were not taken: {epoch}, {ordinals}"

    def consumed_ranges(self, step: int) -> tuple[int, Ranges]:
        """(epoch, its consumed ordinals) for the manifest of a checkpoint at `step`, before it is committed.

        The epoch is the newest one that the checkpoint's weights have seen (0 when they have seen none).
        """
        seen = (samples.c.state.in_((TAKEN, CONSUMED)), samples.c.step <= step)
        with self.read() as rows:
            epoch = rows.scalar(rows.select(sa.func.max(samples.c.epoch)).where(*seen)) or 0
            # Ordinals that follow each other are as far from their rank among the consumed ones.
            ordinal = samples.c.ordinal
            distance = ordinal - sa.func.row_number().over(order_by=ordinal)
            here = rows.select(ordinal, distance.label("distance")).where(*seen, samples.c.epoch == epoch).subquery()
            ends = sa.select(sa.func.min(here.c.ordinal), sa.func.max(here.c.ordinal)).group_by(here.c.distance)
            return epoch, tuple(sorted((first, last) for first, last in rows.all(ends)))

    def commit(self, incarnation: int, record: CheckpointRecord) -> int:
        """The commit point of a checkpoint whose files are all durable; the number of samples it consumed.

        Committing the same step again replaces its row.
        """
        assert record.incarnation == incarnation, "a trainer commits only its own checkpoints"
        with self.write(incarnation) as (rows, _):
            rows.delete_checkpoints(checkpoints.c.step == record.step)
            rows.insert_checkpoint(record)
            rows.update_run(crashes=0, crash_step=NO_STEP)
            return rows.update(samples.c.state == TAKEN, samples.c.step <= record.step, state=CONSUMED)

    def excuse(self, incarnation: int) -> None:
        """The trainer ends because of a fault of the machine: `resume` does not count this end as a crash."""
        with self.write(incarnation) as (rows, _):
            rows.update_run(training=False)

    def finish(self, incarnation: int) -> None:
        """The last checkpoint is committed: generators may stop."""
        with self.write(incarnation) as (rows, _):
            rows.update_run(finished=True, training=False)

    # What anybody asks; no reader waits for a writer ----------------------------------------------------------------

    def checkpoints(self) -> list[CheckpointRecord]:
        """All committed checkpoints, oldest first. A checkpoint folder that is not among them is not a checkpoint."""
        with self.read() as rows:
            return rows.checkpoints()

    def progress(self, epoch: int | None = None) -> SampleProgress:
        """Samples per state, bytes held and capture failures so far (`attempts`), of one epoch or of all."""
        here = () if epoch is None else (samples.c.epoch == epoch,)
        with self.read() as rows:
            query = rows.select(samples.c.state, sa.func.count()).where(*here).group_by(samples.c.state)
            counts = {row[0]: row[1] for row in rows.all(query)}
            sums = ((samples.c.bytes_held, HOLDS_BYTES), (samples.c.failures, HAS_FAILED))
            held, attempts = (int(rows.scalar(rows.select(sa.func.sum(c)).where(has, *here)) or 0) for c, has in sums)
        return SampleProgress(**counts, bytes_held=held, attempts=attempts)

    def quarantined(self) -> list[Quarantined]:
        """Every quarantined sample with its last error, by epoch and ordinal."""
        with self.read() as rows:
            query = rows.select(*(samples.c[name] for name in Quarantined._fields)).order_by(*generators.PLACE)
            return [Quarantined(*row) for row in rows.all(query.where(samples.c.state == QUARANTINED))]

    def count(self, state: str | None = None) -> int:
        """Samples that are in `state` in some epoch, each counted once; all of them reads every row."""
        where = () if state is None else (samples.c.state == state,)
        with self.read() as rows:
            return rows.scalar(rows.select(sa.func.count(sa.distinct(samples.c.sample))).where(*where))

    def capture_rates(self, window_s: float | None = None) -> CaptureRates:
        """What the generators captured in the last `window_s` seconds, or in the whole run, and how long it took."""
        sums = [sa.func.coalesce(sa.func.sum(samples.c[name]), 0) for name in ("tokens", "prefill_s", "put_s")]
        captured = (samples.c.prefill_s > 0, samples.c.state.not_in((PENDING, LEASED, QUARANTINED)))
        with self.read() as rows:
            query = rows.select(*sums, sa.func.count(sa.distinct(samples.c.owner))).where(*captured)
            if window_s is not None:
                # As a value: PostgreSQL walks no index up to a clock.
                query = query.where(samples.c.published > rows.scalar(sa.select(database_now())) - window_s)
            ((tokens, prefill_s, put_s, owners),) = rows.all(query)
        return CaptureRates(tokens=tokens, prefill_s=prefill_s, put_s=put_s, generators=owners)

    def oldest(self) -> Oldest | None:
        """The first sample that is not trained yet; None at the end of the last open epoch."""
        with self.read() as rows:
            held_s = database_now() - (samples.c.lease_expires - rows.run_row().lease_seconds)
            columns = (*(samples.c[name] for name in Oldest._fields[:-1]), held_s)
            found = [row for state in REMAINING for row in rows.all(rows.first(state, *columns, limit=1))]
        return min((Oldest(*row) for row in found), default=None)

    def last_capture(self) -> LastCapture | None:
        """The last sample's publication; None before the first."""
        published = samples.c.published
        with self.read() as rows:
            query = rows.select(published, database_now() - published).where(published.is_not(None))
            found = rows.all(query.order_by(published.desc()).limit(1))
        return LastCapture(*found[0]) if found else None


def _other_samples(rows: Rows, epoch: int) -> Refusal:
    return Refusal(
        f"epoch {epoch} of run {rows.run!r} is in the ledger with other samples: the sample set or its "
        "order has changed; resume with the run's own recipe and data, or start a run of another name"
    )


def _missing(rows: Rows, epoch: int, slots: Sequence[SampleSlot]) -> list[SampleSlot]:
    """Those of an epoch's slots, by ordinal, that have no row. Raises Refusal for slots that do not fit to the rows."""
    answered = samples.c.answer.is_not(None).label("answered")
    query = rows.select(samples.c.ordinal, samples.c.sample, samples.c.tokens, answered)
    here = (samples.c.epoch == epoch, samples.c.ordinal.between(slots[0].ordinal, slots[-1].ordinal))
    there = {row.ordinal: row for row in rows.all(query.where(*here))}
    wanted = {slot.ordinal: slot for slot in slots}
    if not all(ordinal in wanted and _is_of(row, wanted[ordinal]) for ordinal, row in there.items()):
        raise _other_samples(rows, epoch)
    missing = [slot for slot in slots if slot.ordinal not in there]
    later = rows.select(samples.c.epoch).where(samples.c.epoch > epoch, samples.c.state != QUARANTINED)
    if missing and rows.all(later.limit(1)):
        raise Refusal(f"epoch {epoch} of run {rows.run!r} cannot be opened after a later one: open them in turn")
    return missing


def _is_of(row: sa.Row[Any], slot: SampleSlot) -> bool:
    """Whether a row is a slot's. An answer takes no more than was kept for it."""
    return row.sample == slot.sample and row.tokens in (range(1, slot.tokens + 1) if row.answered else [slot.tokens])
