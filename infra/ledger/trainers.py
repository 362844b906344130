"""The trainer's side of the ledger: plan, release, commit, finish. Rank 0 plans and commits; every rank releases.

Each write names the trainer's incarnation and raises StaleIncarnation once another trainer has resumed the run.
"""

from typing import Any

import sqlalchemy as sa

from infra.ledger.answers import EndOfEpoch, Wait
from infra.ledger.planning import balance
from infra.ledger.schema import CONSUMED, NO_STEP, READY, REMAINING, TAKEN, checkpoints, samples
from infra.ledger.transactions import Transactions
from infra.records.data_path import CheckpointRecord, ObjectRecord, PlannedSample, StepPlan


class TrainerSide(Transactions):
    """What a trainer that has resumed asks of the ledger."""

    def plan(
        self,
        incarnation: int,
        epoch: int,
        step: int,
        *,
        ranks: int,
        micro_batches: int,
        samples_per_step: int,
        current_step: int | None = None,
    ) -> StepPlan | Wait | EndOfEpoch:
        """Take the samples of optimizer step `step`; steps count up over all epochs.

        Order `strict`: the first `samples_per_step` remaining samples by ordinal, once all of them are ready. Order
        `any`: the first that are ready. Either way the epoch's last step may be short, and a step is never short while
        other samples may still come. `current_step` is the step that is being trained while this one is planned
        ahead (default: `step` itself); a crash is counted there. Call it even at the end of the epoch to tell.
        """
        with self._write(incarnation) as (connection, run):
            current = step if current_step is None else current_step
            if current != run.current_step:
                self._update_run(connection, current_step=current)
            remaining = self._first_remaining(connection, epoch, samples_per_step)
            if not remaining:
                return EndOfEpoch(epoch=epoch)
            ready = [row for row in remaining if row.state == READY]
            if run.plan_order == "any" and len(ready) < len(remaining):
                ready = self._first(connection, epoch, READY, samples_per_step)
            if len(ready) < len(remaining):
                missing = next((row.ordinal for row in remaining if row.state != READY), None)
                strict = run.plan_order == "strict"
                return Wait(
                    step=step, needed=len(remaining), ready=len(ready), first_missing=missing if strict else None
                )
            plan = _plan_of(ready, epoch, step, ranks, micro_batches)
            self._take(connection, plan)
            return plan

    def release(self, incarnation: int, epoch: int, *ordinals: int) -> None:
        """Free the bytes of samples whose objects this rank has copied out **and deleted**. Their state stays."""
        with self._write(incarnation) as (connection, _):
            change = sa.update(samples).where(
                self._rows(
                    samples.c.epoch == epoch,
                    samples.c.ordinal.in_(ordinals),
                    samples.c.state.in_((TAKEN, CONSUMED)),
                )
            )
            released = connection.execute(change.values(bytes_held=0, object=None)).rowcount
            assert released == len(set(ordinals)), f"release of samples that were not taken: {epoch}, {ordinals}"

    def consumed_ordinals(self, step: int) -> tuple[int, list[int]]:
        """(epoch, ordinals, ascending) for the manifest of a checkpoint at `step`, before it is committed.

        The epoch is the newest one that the checkpoint's weights have seen (0 when they have seen none).
        """
        seen = self._rows(samples.c.state.in_((TAKEN, CONSUMED)), samples.c.step <= step)
        with self._read() as connection:
            epoch = connection.execute(sa.select(sa.func.max(samples.c.epoch)).where(seen)).scalar() or 0
            query = sa.select(samples.c.ordinal).where(seen, samples.c.epoch == epoch).order_by(samples.c.ordinal)
            return epoch, list(connection.execute(query).scalars())

    def commit(self, incarnation: int, record: CheckpointRecord) -> int:
        """The commit point of a checkpoint whose files are all durable; the number of samples it consumed.

        Committing the same step again replaces its row.
        """
        assert record.incarnation == incarnation, "a trainer commits only its own checkpoints"
        with self._write(incarnation) as (connection, _):
            place = (checkpoints.c.run == self.run, checkpoints.c.step == record.step)
            connection.execute(sa.delete(checkpoints).where(*place))
            connection.execute(sa.insert(checkpoints).values(run=self.run, **record.model_dump()))
            trained = self._rows(samples.c.state == TAKEN, samples.c.step <= record.step)
            consumed = connection.execute(sa.update(samples).where(trained).values(state=CONSUMED)).rowcount
            self._update_run(connection, crashes=0, crash_step=NO_STEP)
            return consumed

    def excuse(self, incarnation: int) -> None:
        """The trainer ends because of a fault of the machine: `resume` does not count this end as a crash."""
        with self._write(incarnation) as (connection, _):
            self._update_run(connection, training=False)

    def finish(self, incarnation: int) -> None:
        """The last checkpoint is committed: generators may stop."""
        with self._write(incarnation) as (connection, _):
            self._update_run(connection, finished=True, training=False)

    def checkpoints(self) -> list[CheckpointRecord]:
        """All committed checkpoints, oldest first. A checkpoint folder that is not among them is not a checkpoint."""
        with self._read() as connection:
            return self._checkpoints(connection)

    def _checkpoints(self, connection: sa.Connection) -> list[CheckpointRecord]:
        query = sa.select(checkpoints).where(checkpoints.c.run == self.run).order_by(checkpoints.c.step)
        return [
            CheckpointRecord(step=row.step, path=row.path, manifest_hash=row.manifest_hash, incarnation=row.incarnation)
            for row in connection.execute(query)
        ]

    def _first(self, connection: sa.Connection, epoch: int, state: str, limit: int) -> list[sa.Row[Any]]:
        here = self._rows(samples.c.state == state, samples.c.epoch == epoch)
        query = sa.select(samples).where(here).order_by(samples.c.ordinal).limit(limit)
        return list(connection.execute(query))

    def _first_remaining(self, connection: sa.Connection, epoch: int, limit: int) -> list[sa.Row[Any]]:
        """The first `limit` samples by ordinal that are pending, leased or ready (one index walk per state)."""
        rows = [row for state in REMAINING for row in self._first(connection, epoch, state, limit)]
        return sorted(rows, key=lambda row: row.ordinal)[:limit]

    def _take(self, connection: sa.Connection, plan: StepPlan) -> None:
        latest = connection.execute(sa.select(sa.func.max(samples.c.step)).where(self._rows())).scalar()
        assert latest is None or latest < plan.step, f"step {plan.step} planned after step {latest}"
        change = (
            sa.update(samples)
            .where(self._rows(samples.c.epoch == plan.epoch, samples.c.ordinal == sa.bindparam("at_ordinal")))
            .values(
                state=TAKEN,
                step=plan.step,
                rank=sa.bindparam("new_rank"),
                micro_batch=sa.bindparam("new_micro_batch"),
            )
        )
        rows = [{"at_ordinal": s.ordinal, "new_rank": s.rank, "new_micro_batch": s.micro_batch} for s in plan.samples]
        connection.execute(change, rows)


def _plan_of(rows: list[sa.Row[Any]], epoch: int, step: int, ranks: int, micro_batches: int) -> StepPlan:
    places = balance([row.tokens for row in rows], ranks, micro_batches)
    planned = tuple(
        PlannedSample(
            epoch=epoch,
            ordinal=row.ordinal,
            sample=row.sample,
            tokens=row.tokens,
            rank=rank,
            micro_batch=micro_batch,
            object=ObjectRecord.model_validate_json(row.object),
        )
        for row, (rank, micro_batch) in zip(rows, places, strict=True)
    )
    return StepPlan(step=step, epoch=epoch, micro_batches=micro_batches, samples=planned)
