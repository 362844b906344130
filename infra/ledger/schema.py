"""The ledger's tables, its database's clock, and one run's rows.

`runs` holds one row per run: its fixed values, the trainer's incarnation, and the row that every write locks.
`samples` holds one row per (run, epoch, ordinal); `checkpoints` one row per committed checkpoint. `samples.tokens` of a
prompt that is answered while it is captured is the most that the sample may have, until its `answer` (JSON) is there.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from infra.records.data_path import CheckpointRecord

PENDING, LEASED, READY = "pending", "leased", "ready"
TAKEN, CONSUMED, QUARANTINED = "taken", "consumed", "quarantined"
STATES = (PENDING, LEASED, READY, TAKEN, CONSUMED, QUARANTINED)
REMAINING = (PENDING, LEASED, READY)
"""States of the samples that an epoch still has to plan."""

NO_STEP = -1
"""Below every step: no checkpoint, or a trainer that has not planned yet."""

metadata = sa.MetaData()

runs = sa.Table(
    "runs",
    metadata,
    sa.Column("name", sa.String(200), primary_key=True),
    sa.Column("budget_bytes", sa.BigInteger, nullable=False),
    sa.Column("bytes_per_token", sa.BigInteger, nullable=False),
    sa.Column("lease_seconds", sa.Double, nullable=False),
    sa.Column("max_attempts", sa.Integer, nullable=False),
    sa.Column("plan_order", sa.String(10), nullable=False),
    sa.Column("incarnation", sa.BigInteger, nullable=False, default=0),
    sa.Column("attempt_floor", sa.BigInteger, nullable=False, default=0),
    sa.Column("training", sa.Boolean, nullable=False, default=False),
    sa.Column("finished", sa.Boolean, nullable=False, default=False),
    sa.Column("current_step", sa.Integer, nullable=False, default=NO_STEP),
    sa.Column("crash_step", sa.Integer, nullable=False, default=NO_STEP),
    sa.Column("crashes", sa.Integer, nullable=False, default=0),
)

samples = sa.Table(
    "samples",
    metadata,
    sa.Column("run", sa.String(200), sa.ForeignKey("runs.name"), primary_key=True),
    sa.Column("epoch", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("ordinal", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("sample", sa.Integer, nullable=False),
    sa.Column("tokens", sa.Integer, nullable=False),
    sa.Column("state", sa.String(12), nullable=False, default=PENDING),
    sa.Column("attempt", sa.BigInteger, nullable=False, default=0),
    sa.Column("failures", sa.Integer, nullable=False, default=0),
    sa.Column("bytes_held", sa.BigInteger, nullable=False, default=0),
    sa.Column("owner", sa.String(200)),
    sa.Column("lease_expires", sa.Double),
    sa.Column("object", sa.Text),
    sa.Column("answer", sa.Text),
    sa.Column("prefill_s", sa.Double, nullable=False, default=0.0),
    sa.Column("put_s", sa.Double, nullable=False, default=0.0),
    sa.Column("published", sa.Double),
    sa.Column("error", sa.Text),
    sa.Column("step", sa.Integer),
    sa.Column("rank", sa.Integer),
    sa.Column("micro_batch", sa.Integer),
    sa.CheckConstraint(f"state IN {STATES}", name="known_state"),
    sa.CheckConstraint("bytes_held >= 0", name="bytes_not_negative"),
)
sa.Index("samples_by_state", samples.c.run, samples.c.state, samples.c.epoch, samples.c.ordinal)
sa.Index("samples_by_step", samples.c.run, samples.c.step)
sa.Index(
    "samples_holding_bytes",
    samples.c.run,
    samples.c.epoch,
    samples.c.ordinal,
    sqlite_where=sa.text("bytes_held > 0"),
    postgresql_where=sa.text("bytes_held > 0"),
)
HOLDS_BYTES = sa.text("bytes_held > 0")
"""As literal text, or SQLite does not use the partial index."""

checkpoints = sa.Table(
    "checkpoints",
    metadata,
    sa.Column("run", sa.String(200), sa.ForeignKey("runs.name"), primary_key=True),
    sa.Column("step", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("path", sa.Text, nullable=False),
    sa.Column("manifest_hash", sa.String(128), nullable=False),
    sa.Column("incarnation", sa.BigInteger, nullable=False),
)

NOTHING_HELD = dict.fromkeys(("owner", "lease_expires", "object", "step", "rank", "micro_batch")) | {"bytes_held": 0}
"""Values of a row that holds no object and belongs to no step."""


class database_now(FunctionElement[float]):
    """Seconds since 1970 by the database's clock, the only clock that leases know."""

    type = sa.Double()
    inherit_cache = True


@compiles(database_now, "sqlite")
def _now_sqlite(element: database_now, compiler: Any, **options: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(database_now, "postgresql")
def _now_postgresql(element: database_now, compiler: Any, **options: Any) -> str:
    return "CAST(extract(epoch FROM clock_timestamp()) AS double precision)"


Condition = sa.ColumnElement[bool] | sa.TextClause


class Rows:
    """One run's rows inside an open transaction."""

    def __init__(self, connection: sa.Connection, run: str) -> None:
        self.connection, self.run = connection, run

    def select(self, *columns: Any) -> sa.Select[Any]:
        """A query of the run's samples, to be narrowed and passed to `all` or `scalar`."""
        return sa.select(*columns).where(samples.c.run == self.run)

    def all(self, query: sa.Select[Any]) -> list[sa.Row[Any]]:
        return list(self.connection.execute(query))

    def scalar(self, query: sa.Select[Any]) -> Any:
        """The first column of the first row; None without a row."""
        return self.connection.execute(query).scalar()

    def insert(self, rows: Iterable[Mapping[str, Any]]) -> None:
        if values := [{"run": self.run, **row} for row in rows]:
            self.connection.execute(sa.insert(samples), values)

    def update(self, *where: Condition, **values: Any) -> int:
        """Change the samples for which all of `where` hold; their number."""
        change = sa.update(samples).where(samples.c.run == self.run, *where).values(**values)
        return self.connection.execute(change).rowcount

    def give_back(self, *where: Condition) -> int:
        """Make these samples pending; their number."""
        return self.update(*where, state=PENDING, **NOTHING_HELD)

    def update_run(self, **values: Any) -> None:
        self.connection.execute(sa.update(runs).where(runs.c.name == self.run).values(**values))

    def insert_checkpoint(self, record: CheckpointRecord) -> None:
        self.connection.execute(sa.insert(checkpoints).values(run=self.run, **record.model_dump()))

    def delete_checkpoints(self, where: sa.ColumnElement[bool]) -> None:
        self.connection.execute(sa.delete(checkpoints).where(checkpoints.c.run == self.run, where))

    def checkpoints(self) -> list[CheckpointRecord]:
        """All committed checkpoints, oldest first."""
        columns = (checkpoints.c[name] for name in CheckpointRecord.model_fields)
        query = sa.select(*columns).where(checkpoints.c.run == self.run).order_by(checkpoints.c.step)
        return [CheckpointRecord(**row._asdict()) for row in self.connection.execute(query)]
