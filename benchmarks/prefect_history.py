"""Fills Prefect's database with copies of one flow run that really ran: 35,000 runs a year cannot all be executed."""

import sqlite3
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

COPIED = {
    "flow_run": "id = :run",
    "flow_run_state": "flow_run_id = :run",
    "task_run": "flow_run_id = :run",
    "task_run_state": "task_run_id IN (SELECT id FROM task_run WHERE flow_run_id = :run)",
    "log": "flow_run_id = :run",
    "artifact": "flow_run_id = :run",
    "events": "id IN (SELECT event_id FROM event_resources WHERE resource_id = 'prefect.flow-run.' || :run)",
    "event_resources": "event_id IN "
    "(SELECT event_id FROM event_resources WHERE resource_id = 'prefect.flow-run.' || :run)",
}
"""Tables that hold a flow run, and which of their rows are its own."""
RESOURCES = ("prefect.flow-run.", "prefect.task-run.")
BUSY_S = 120.0


@dataclass(frozen=True)
class Rows:
    """One table's rows of the copied flow run."""

    table: str
    columns: tuple[str, ...]
    values: tuple[tuple[object, ...], ...]


def read_run(database: Path, run: str) -> list[Rows]:
    """All rows of a flow run that has ended."""
    found = []
    with sqlite3.connect(database, timeout=BUSY_S) as connection:
        for table, condition in COPIED.items():
            cursor = connection.execute(f"SELECT * FROM {table} WHERE {condition}", {"run": run})
            columns = tuple(column[0] for column in cursor.description)
            found.append(Rows(table, columns, tuple(cursor.fetchall())))
    return found


def copy_run(database: Path, template: Sequence[Rows], times: int) -> None:
    """Add `times` copies of a flow run. Its own ids are new in each copy; ids of its flow and deployment are shared."""
    own = {str(row[rows.columns.index("id")]) for rows in template for row in rows.values}
    with sqlite3.connect(database, timeout=BUSY_S) as connection:
        for _ in range(times):
            renamed = {name: str(uuid.uuid4()) for name in own}
            renamed |= {prefix + old: prefix + new for prefix in RESOURCES for old, new in list(renamed.items())}
            for rows in template:
                copies = [tuple(renamed.get(value, value) for value in row) for row in rows.values]  # pyright: ignore
                columns, marks = ", ".join(f'"{name}"' for name in rows.columns), ", ".join("?" * len(rows.columns))
                connection.executemany(f"INSERT INTO {rows.table} ({columns}) VALUES ({marks})", copies)
