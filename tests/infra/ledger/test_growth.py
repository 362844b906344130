"""No operation of a running epoch reads more rows where there are more: counted, not timed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from infra.ledger.generators import Publication
from infra.ledger.ledger import Ledger
from infra.ledger.pulse import in_flight, pulse
from infra.ledger.schema import CONSUMED, samples
from infra.ledger.trainers import StepPlan, plan_step, resume_run
from infra.records.data_path import CheckpointRecord, Lease, ObjectRecord, SampleSlot
from infra.servers.postgres import PostgresServer

Captured = Callable[[Ledger, Lease], ObjectRecord]
STEP = 8


class Work:
    """What the database has done for a ledger so far: instructions on SQLite, rows read on PostgreSQL."""

    def __init__(self, ledger: Ledger):
        self._engine, self.instructions = ledger._engine, 0
        if ledger._engine.dialect.name == "sqlite":
            with ledger._engine.connect() as connection:
                raw: Any = connection.connection.driver_connection
                raw.set_progress_handler(self._count, 1)

    def _count(self) -> int:
        self.instructions += 1
        return 0

    def done(self) -> int:
        if self._engine.dialect.name == "sqlite":
            return self.instructions
        with self._engine.begin() as connection:
            connection.execute(sa.text("SELECT pg_stat_force_next_flush()"))
        query = "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_user_tables WHERE relname = 'samples'"
        with self._engine.begin() as connection:
            return connection.execute(sa.text(query)).scalar_one()


def half_trained(url: str, count: int) -> tuple[Ledger, int]:
    """A ledger of which half is consumed, and whose statistics are from the time when all was pending."""
    ledger = Ledger.open(url, "run")
    ledger.create_run(budget_bytes=1000, bytes_per_token=1, lease_seconds=60, max_attempts=2, order="strict")
    ledger.open_epoch(None, 0, [SampleSlot(ordinal=i, sample=i, tokens=1) for i in range(count)])
    with ledger._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(sa.text("ANALYZE"))
    with ledger._engine.begin() as connection:
        first = sa.update(samples).where(samples.c.ordinal < count // 2)
        connection.execute(first.values(state=CONSUMED, step=samples.c.ordinal / STEP + 1, published=1.0))
    return ledger, resume_run(ledger, lambda _: True, lambda _: True).incarnation


def one_step(ledger: Ledger, incarnation: int, step: int, captured: Captured) -> None:
    """All that generators, a trainer and the flow ask while a step is made."""
    leases = ledger.lease("g", STEP)
    assert not ledger.publish(*(Publication(lease, captured(ledger, lease), 0.1, 0.1) for lease in leases))
    assert ledger.lease("g", STEP)
    assert ledger.renew("g") == ledger.give_back("g") == STEP
    assert ledger.oldest()
    plan = plan_step(ledger, incarnation, 0, step, ranks=2, micro_batches=1, samples_per_step=STEP)
    assert isinstance(plan, StepPlan)
    ledger.release(incarnation, 0, *(sample.ordinal for sample in plan.samples))
    record = CheckpointRecord(step=step, path="", manifest_hash="", incarnation=incarnation)
    assert ledger.commit(incarnation, record) == STEP
    assert pulse(ledger).checkpoint == step
    assert in_flight(ledger) == 0
    assert ledger.capture_rates(60.0).tokens
    assert ledger.count("quarantined") == 0


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_work_does_not_grow_with_the_samples(
    kind: str, tmp_path: Path, postgres: PostgresServer, captured: Captured
) -> None:
    done: dict[int, int] = {}
    for count in (1_000, 20_000):
        url = postgres.make_database(f"growth{count}") if kind == "postgresql" else f"sqlite:///{tmp_path}/{count}.db"
        ledger, incarnation = half_trained(url, count)
        with ledger:
            work = Work(ledger)
            before = work.done()
            for step in range(count, count + 8):  # after some, PostgreSQL plans for any values
                one_step(ledger, incarnation, step, captured)
            done[count] = work.done() - before
    assert 0 < done[20_000] < 1.5 * done[1_000], done
