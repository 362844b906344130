"""The ledger's tables, its database's clock, and one run's rows.

`runs` holds one row per run: its fixed values, the trainer's incarnation, and the row that every write locks.
`samples` holds one row per (run, epoch, ordinal); `checkpoints` one row per committed checkpoint. `samples.tokens` of a
prompt that is answered while it is captured is the most that the sample may have, until its `answer` (JSON) is there.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

from infra.records.data_path import CheckpointRecord
from infra.refusal import Refusal

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
    sa.CheckConstraint(f"state IN {STATES}", name="known_state"),
    sa.CheckConstraint("bytes_held >= 0", name="bytes_not_negative"),
)
sa.Index("samples_by_state", samples.c.run, samples.c.state, samples.c.epoch, samples.c.ordinal)


def _partial(name: str, condition: str, *columns: sa.Column[Any]) -> None:
    """An index of the rows for which a condition holds.

    One of all rows would begin with the run like all others, and PostgreSQL would take any of them where it has no
    statistics.
    """
    where = sa.text(condition)
    sa.Index(name, samples.c.run, *columns, sqlite_where=where, postgresql_where=where)


_partial("samples_by_step", "step IS NOT NULL", samples.c.step)
_partial("samples_by_publication", "published IS NOT NULL", samples.c.published)
_partial("samples_holding_bytes", "bytes_held > 0", samples.c.bytes_held)
_partial("samples_that_failed", "failures > 0", samples.c.failures)
for column in (samples.c.state, samples.c.step):
    # Their values change all the time. With statistics of an hour ago, when all was pending, PostgreSQL reads the whole
    # table to find the few that still are; without any it always walks along the index.
    without = sa.DDL(f"ALTER TABLE samples ALTER COLUMN {column.name} SET STATISTICS 0")
    event.listen(samples, "after_create", without.execute_if(dialect="postgresql"))
HOLDS_BYTES, HAS_FAILED = sa.text("bytes_held > 0"), sa.text("failures > 0")
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

NOTHING_HELD = dict.fromkeys(("owner", "lease_expires", "object", "step")) | {"bytes_held": 0}
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

    def run_row(self, locked: bool = False) -> sa.Row[Any]:
        """The run itself; `locked` until the transaction ends. Raises Refusal where there is none."""
        query = sa.select(runs).where(runs.c.name == self.run)
        row = self.connection.execute(query.with_for_update() if locked else query).one_or_none()
        if row is None:
            raise Refusal(f"the ledger holds no run {self.run!r}: it is made by create_run when the run starts")
        return row

    def select(self, *columns: Any) -> sa.Select[Any]:
        """A query of the run's samples, to be narrowed and passed to `all` or `scalar`."""
        return sa.select(*columns).where(samples.c.run == self.run)

    def all(self, query: sa.Select[Any]) -> list[sa.Row[Any]]:
        return list(self.connection.execute(query))

    def scalar(self, query: sa.Select[Any]) -> Any:
        """The first column of the first row; None without a row."""
        return self.connection.execute(query).scalar()

    def first(self, state: str, *columns: Any, limit: int) -> sa.Select[Any]:
        """A query of the first samples in a state: one walk along an index, however many there are."""
        here = self.select(*columns).where(samples.c.state == state)
        return here.order_by(samples.c.epoch, samples.c.ordinal).limit(limit)

    def insert(self, rows: Iterable[Mapping[str, Any]]) -> None:
        if values := [{"run": self.run, **row} for row in rows]:
            self.connection.execute(sa.insert(samples), values)

    def update(self, *where: Condition, **values: Any) -> int:
        """Change the samples for which all of `where` hold; their number."""
        change = sa.update(samples).where(samples.c.run == self.run, *where).values(**values)
        return self.connection.execute(change).rowcount

    def update_each(self, changes: Sequence[Mapping[str, Any]], **of_all: Any) -> None:
        """Change many samples in one round trip: each entry has an epoch, an ordinal and the same columns' values.

        `of_all` are values that all get.
        """
        if not changes:
            return
        keys = {name: sa.bindparam(f"at_{name}") for name in ("epoch", "ordinal")}
        values = {name: sa.bindparam(f"to_{name}") for name in changes[0] if name not in keys}
        where = (samples.c[name] == key for name, key in keys.items())
        change = sa.update(samples).where(samples.c.run == self.run, *where).values(**values, **of_all)
        each = [{f"{'at' if name in keys else 'to'}_{name}": row[name] for name in row} for row in changes]
        self.connection.execute(change, each)

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
