"""How a trainer takes over a run from its predecessor."""

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import sqlalchemy as sa

from infra.ledger.answers import RepeatedCrash, Resume
from infra.ledger.schema import (
    CONSUMED,
    HOLDS_BYTES,
    NO_STEP,
    PENDING,
    QUARANTINED,
    READY,
    REMAINING,
    TAKEN,
    checkpoints,
    database_now,
    samples,
)
from infra.ledger.trainers import TrainerSide
from infra.records.data_path import CheckpointRecord, ObjectRecord, SampleSlot
from infra.refusal import Refusal

Verified = TypeVar("Verified", CheckpointRecord, ObjectRecord)

MAX_CRASHES = 3
"""Trainer crashes at one step, with no checkpoint between them, that stop a run."""


class ResumeSide(TrainerSide):
    """What a trainer that starts asks of the ledger."""

    def resume(
        self, verify_checkpoint: Callable[[CheckpointRecord], bool], verify_object: Callable[[ObjectRecord], bool]
    ) -> Resume:
        """Take the run over in one transaction; every older trainer's writes fail from here on.

        The newest checkpoint that verifies survives. Samples trained after it are pending again; samples taken or
        ready are ready if their object still verifies, else pending; epochs after the surviving one are closed (their
        quarantined samples stay listed). Verifying happens before the lock is taken, except for what changed since.
        Raises RepeatedCrash, changing nothing, at the third crash of a trainer at the same step.
        """
        checkpoint_is_whole = _remembering(verify_checkpoint)
        object_is_whole = _remembering(verify_object)
        with self._read() as connection:
            committed, objects = self._checkpoints(connection), self._objects(connection)
        _newest(committed, checkpoint_is_whole)
        for _, _, record in objects:
            object_is_whole(record)
        with self._write() as (connection, run):
            crashes, crash_step = self._count_crash(connection, run)
            committed = self._checkpoints(connection)
            survivor = _newest(committed, checkpoint_is_whole)
            step = survivor.step if survivor else NO_STEP
            dropped = tuple(record for record in committed if record.step > step)
            newer = (checkpoints.c.run == self.run, checkpoints.c.step > step)
            connection.execute(sa.delete(checkpoints).where(*newer))
            self._to_pending(connection, samples.c.state == CONSUMED, samples.c.step > step)
            epoch = self._epoch_of(connection, step)
            floor = self._close_later_epochs(connection, epoch)
            self._return_taken(connection, object_is_whole)
            evicted = self._evict(connection, run) if run.plan_order == "strict" else 0
            self._update_run(
                connection,
                incarnation=run.incarnation + 1,
                attempt_floor=max(floor, run.attempt_floor),
                training=True,
                finished=False,
                current_step=NO_STEP,
                crashes=crashes,
                crash_step=crash_step,
            )
            return Resume(
                incarnation=run.incarnation + 1, checkpoint=survivor, epoch=epoch, dropped=dropped, evicted=evicted
            )

    def forget_crashes(self) -> None:
        """Reset the count of trainer crashes."""
        with self._engine.begin() as connection:
            self._update_run(connection, training=False)

    def reopen(self) -> None:
        """Reopen a finished run: no generator ends before a trainer has finished again.

        Its newest checkpoint may turn out to be damaged, and generators that had ended by then would capture nothing.
        """
        with self._engine.begin() as connection:
            self._update_run(connection, finished=False)

    def rebuild(
        self, checkpoint: CheckpointRecord, epoch: int, slots: Sequence[SampleSlot], consumed: Collection[int]
    ) -> None:
        """Write a lost ledger anew from a verified checkpoint and its manifest's epoch and ordinals.

        The run must have been created and hold nothing. Incarnation and attempts continue from the database's clock in
        microseconds, above any number that a process of the lost ledger can hold. Raises Refusal where rows exist.
        """
        trained = set(consumed)
        unknown = trained - {slot.ordinal for slot in slots}
        if unknown:
            raise Refusal(f"the manifest of {checkpoint.path} names ordinals {sorted(unknown)} beyond its epoch")
        with self._write() as (connection, _):
            existing = sa.select(sa.func.count()).select_from(samples).where(self._rows())
            if connection.execute(existing).scalar_one() or self._checkpoints(connection):
                raise Refusal(f"the ledger of run {self.run!r} is not empty: resume it instead of rebuilding it")
            floor = int(connection.execute(sa.select(database_now())).scalar_one() * 1e6)
            rows = [
                {
                    "run": self.run,
                    "epoch": epoch,
                    "attempt": floor,
                    "state": CONSUMED if slot.ordinal in trained else PENDING,
                    "step": checkpoint.step if slot.ordinal in trained else None,
                }
                | slot.model_dump()
                for slot in slots
            ]
            connection.execute(sa.insert(samples), rows)
            connection.execute(sa.insert(checkpoints).values(run=self.run, **checkpoint.model_dump()))
            self._update_run(connection, incarnation=max(floor, checkpoint.incarnation), attempt_floor=floor)

    def _count_crash(self, connection: sa.Connection, run: sa.Row[Any]) -> tuple[int, int]:
        """(crashes, step) with the last trainer's end counted, unless it finished or there was none."""
        if not run.training:
            return 0, NO_STEP
        crashes = run.crashes + 1 if run.current_step == run.crash_step else 1
        if crashes < MAX_CRASHES:
            return crashes, run.current_step
        query = sa.select(samples).where(self._rows(samples.c.step == run.current_step)).order_by(samples.c.ordinal)
        named = ", ".join(
            f"epoch {row.epoch} ordinal {row.ordinal} (sample {row.sample}, {row.tokens} tokens)"
            for row in connection.execute(query)
        )
        place = f"at step {run.current_step}, which trains {named}" if named else "before its first step"
        raise RepeatedCrash(
            f"the trainer of run {self.run!r} crashed {crashes} times {place}. "
            "Its log says why. Fix that, then resume the run"
        )

    def _objects(self, connection: sa.Connection) -> list[tuple[int, int, ObjectRecord]]:
        held = self._rows(samples.c.state.in_((READY, TAKEN)), samples.c.object.is_not(None))
        query = sa.select(samples.c.epoch, samples.c.ordinal, samples.c.object).where(held)
        return [
            (row.epoch, row.ordinal, ObjectRecord.model_validate_json(row.object)) for row in connection.execute(query)
        ]

    def _epoch_of(self, connection: sa.Connection, step: int) -> int:
        """The newest epoch that the weights of `step` have seen, or 0."""
        seen = self._rows(samples.c.state == CONSUMED, samples.c.step <= step)
        return connection.execute(sa.select(sa.func.max(samples.c.epoch)).where(seen)).scalar() or 0

    def _close_later_epochs(self, connection: sa.Connection, epoch: int) -> int:
        """Remove the epochs after `epoch`; the highest attempt that their rows had.

        Their samples must not reuse those attempts when the epoch opens again: a late publish of a removed row would
        pass for the new one's.
        """
        later = self._rows(samples.c.epoch > epoch)
        highest = connection.execute(sa.select(sa.func.max(samples.c.attempt)).where(later)).scalar() or 0
        connection.execute(sa.delete(samples).where(later, samples.c.state != QUARANTINED))
        return highest

    def _return_taken(self, connection: sa.Connection, object_is_whole: Callable[[ObjectRecord], bool]) -> None:
        """Taken and ready rows become ready or pending; no consumed row holds bytes (the sweeper deletes those)."""
        connection.execute(
            sa.update(samples)
            .where(self._rows(samples.c.state == CONSUMED), HOLDS_BYTES)
            .values(bytes_held=0, object=None)
        )
        self._to_pending(connection, samples.c.state == TAKEN, samples.c.object.is_(None))
        for epoch, ordinal, record in self._objects(connection):
            if not object_is_whole(record):
                self._to_pending(connection, samples.c.epoch == epoch, samples.c.ordinal == ordinal)
        taken = sa.update(samples).where(self._rows(samples.c.state == TAKEN))
        connection.execute(taken.values(state=READY, step=None, rank=None, micro_batch=None))

    def _evict(self, connection: sa.Connection, run: sa.Row[Any]) -> int:
        """Make invariant I of infra.ledger.generators true again; the number of rows evicted.

        What holds bytes beyond the point at which all remaining samples up to it exceed the budget goes back.
        """
        place = (samples.c.epoch, samples.c.ordinal)
        upto = sa.func.sum(samples.c.tokens).over(order_by=place).label("upto")
        remaining = sa.select(*place, samples.c.bytes_held, upto).where(self._rows(samples.c.state.in_(REMAINING)))
        line = remaining.subquery()
        beyond = sa.select(line.c.epoch, line.c.ordinal).where(
            line.c.bytes_held > 0, line.c.upto * run.bytes_per_token > run.budget_bytes
        )
        rows = list(connection.execute(beyond))
        for row in rows:
            self._to_pending(connection, samples.c.epoch == row.epoch, samples.c.ordinal == row.ordinal)
        return len(rows)


def _newest(committed: list[CheckpointRecord], is_whole: Callable[[CheckpointRecord], bool]) -> CheckpointRecord | None:
    return next((record for record in reversed(committed) if is_whole(record)), None)


def _remembering(verify: Callable[[Verified], bool]) -> Callable[[Verified], bool]:
    """`verify`, asked at most once about the same record."""
    verdicts: dict[str, bool] = {}

    def answer(record: Verified) -> bool:
        name = record.model_dump_json()
        if name not in verdicts:
            verdicts[name] = verify(record)
        return verdicts[name]

    return answer
