"""The ledger's transactions: one at a time per run."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa

from infra.ledger.answers import StaleIncarnation
from infra.ledger.schema import HOLDS_BYTES, PENDING, runs, samples
from infra.refusal import Refusal

NOTHING_HELD: dict[str, Any] = {
    "bytes_held": 0,
    "owner": None,
    "lease_expires": None,
    "object": None,
    "step": None,
    "rank": None,
    "micro_batch": None,
}
"""Values of a row that holds no object and belongs to no step."""


class Transactions:
    """A process's connection to one run's rows."""

    def __init__(self, engine: sa.Engine, run: str) -> None:
        self._engine = engine
        self._reader = engine.execution_options(reads=True)
        self.run = run

    @contextmanager
    def _write(self, incarnation: int | None = None) -> Iterator[tuple[sa.Connection, sa.Row[Any]]]:
        """A transaction that holds the run's row: writers of a run take turns, so sums over its rows are exact.

        A trainer names its incarnation; raises StaleIncarnation when another trainer has resumed since.
        """
        with self._engine.begin() as connection:
            row = connection.execute(sa.select(runs).where(runs.c.name == self.run).with_for_update()).one_or_none()
            if row is None:
                raise Refusal(f"the ledger holds no run {self.run!r}: it is made by create_run when the run starts")
            if incarnation is not None and incarnation != row.incarnation:
                raise StaleIncarnation(
                    f"run {self.run!r} belongs to trainer incarnation {row.incarnation}; this is {incarnation}"
                )
            yield connection, row

    @contextmanager
    def _read(self) -> Iterator[sa.Connection]:
        """One consistent snapshot; never waits for writers."""
        with self._reader.begin() as connection:
            yield connection

    def _rows(self, *conditions: sa.ColumnElement[bool]) -> sa.ColumnElement[bool]:
        return sa.and_(samples.c.run == self.run, *conditions)

    def _held(self, connection: sa.Connection) -> int:
        total = sa.select(sa.func.coalesce(sa.func.sum(samples.c.bytes_held), 0)).where(self._rows(), HOLDS_BYTES)
        return int(connection.execute(total).scalar_one())

    def _to_pending(self, connection: sa.Connection, *conditions: sa.ColumnElement[bool]) -> int:
        """Give the rows back to the generators; their number."""
        change = sa.update(samples).where(self._rows(*conditions)).values(state=PENDING, **NOTHING_HELD)
        return connection.execute(change).rowcount

    def _update_run(self, connection: sa.Connection, **values: Any) -> None:
        connection.execute(sa.update(runs).where(runs.c.name == self.run).values(**values))
