"""The ledger of a run: the durable record of every sample's state. Opened once by every process of the run.

`pending -> leased -> ready -> taken -> consumed`, or `quarantined`. The flow creates the run, the trainer opens epochs,
plans and commits, generators lease and publish, and anybody may ask for progress.
"""

from collections.abc import Sequence
from typing import Literal, Self

import sqlalchemy as sa

from infra.ledger.generators import GeneratorSide
from infra.ledger.questions import Questions
from infra.ledger.resume import ResumeSide
from infra.ledger.schema import PENDING, QUARANTINED, checkpoints, lock_schema, open_engine, runs, samples
from infra.records.data_path import SampleSlot
from infra.refusal import Refusal


class Ledger(GeneratorSide, ResumeSide, Questions):
    """One process's connection to one run's ledger. Threads may share it; a forked child may not."""

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

    def create_run(
        self,
        *,
        budget_bytes: int,
        bytes_per_token: int,
        lease_seconds: float,
        max_attempts: int,
        order: Literal["strict", "any"],
    ) -> None:
        """Enter the run; nothing happens when it is there with the same values.

        Raises Refusal when it is there with others, or when a value makes no sense.
        """
        values = {
            "budget_bytes": budget_bytes,
            "bytes_per_token": bytes_per_token,
            "lease_seconds": float(lease_seconds),
            "max_attempts": max_attempts,
            "plan_order": order,
        }
        if min(budget_bytes, bytes_per_token, lease_seconds, max_attempts) <= 0 or order not in ("strict", "any"):
            raise Refusal(f"the ledger's values must be positive and order strict or any: {values}")
        with self._engine.begin() as connection:
            lock_schema(connection)
            row = connection.execute(sa.select(runs).where(runs.c.name == self.run)).mappings().one_or_none()
            if row is None:
                connection.execute(sa.insert(runs).values(name=self.run, **values))
                return
        others = [f"{name}: {row[name]} there, {value} here" for name, value in values.items() if row[name] != value]
        if others:
            raise Refusal(
                f"run {self.run!r} is in the ledger with other values ({'; '.join(others)}): resume it with its own "
                "recipe, or start a run of another name"
            )

    def delete_run(self) -> int:
        """Remove the run with all its rows, for a run whose folder goes; the number of sample rows. Idempotent."""
        with self._engine.begin() as connection:
            # The run's row last: the others refer to it.
            count = connection.execute(sa.delete(samples).where(samples.c.run == self.run)).rowcount
            connection.execute(sa.delete(checkpoints).where(checkpoints.c.run == self.run))
            connection.execute(sa.delete(runs).where(runs.c.name == self.run))
            return count

    def open_epoch(self, incarnation: int | None, epoch: int, slots: Sequence[SampleSlot]) -> None:
        """Enter one row per sample; those already there stay as they are.

        A trainer names its incarnation; None is for whoever opens the first epoch before any trainer. A sample
        that was quarantined in another epoch is quarantined in this one too. Raises Refusal for a sample larger than
        the budget, for slots that differ from the rows that are there, and for an epoch before one already open.
        """
        with self._write(incarnation) as (connection, run):
            _refuse_slots(slots, run.budget_bytes, run.bytes_per_token)
            missing = self._missing(connection, epoch, slots)
            bad = self._quarantined_samples(connection)
            rows = [
                {
                    "run": self.run,
                    "epoch": epoch,
                    "attempt": run.attempt_floor,
                    "state": QUARANTINED if slot.sample in bad else PENDING,
                    "error": bad.get(slot.sample),
                }
                | slot.model_dump()
                for slot in missing
            ]
            if rows:
                connection.execute(sa.insert(samples), rows)

    def _missing(self, connection: sa.Connection, epoch: int, slots: Sequence[SampleSlot]) -> list[SampleSlot]:
        columns = (samples.c.ordinal, samples.c.sample, samples.c.tokens)
        query = sa.select(*columns).where(self._rows(samples.c.epoch == epoch))
        there = {row.ordinal: SampleSlot(**row._asdict()) for row in connection.execute(query)}
        wanted = {slot.ordinal: slot for slot in slots}
        if len(wanted) != len(slots) or any(wanted.get(ordinal) != slot for ordinal, slot in there.items()):
            raise Refusal(
                f"epoch {epoch} of run {self.run!r} is in the ledger with other samples: the sample set or its "
                "order has changed; resume with the run's own recipe and data, or start a run of another name"
            )
        missing = [slot for slot in slots if slot.ordinal not in there]
        later = self._rows(samples.c.epoch > epoch, samples.c.state != QUARANTINED)
        if missing and connection.execute(sa.select(samples.c.epoch).where(later).limit(1)).first():
            raise Refusal(f"epoch {epoch} of run {self.run!r} cannot be opened after a later one: open them in turn")
        return missing

    def _quarantined_samples(self, connection: sa.Connection) -> dict[int, str]:
        query = sa.select(samples.c.sample, samples.c.error).where(self._rows(samples.c.state == QUARANTINED))
        return {row.sample: row.error for row in connection.execute(query)}


def _refuse_slots(slots: Sequence[SampleSlot], budget_bytes: int, bytes_per_token: int) -> None:
    for slot in slots:
        if slot.tokens < 1:
            raise Refusal(f"sample {slot.sample} has no tokens: leave it out of the sample set")
        if slot.tokens * bytes_per_token > budget_bytes:
            raise Refusal(
                f"sample {slot.sample} needs {slot.tokens} tokens x {bytes_per_token} bytes = "
                f"{slot.tokens * bytes_per_token} bytes, more than the budget of {budget_bytes}: raise "
                "transport.budget_mib or lower data.max_tokens"
            )
