"""Lets days pass for files and databases by moving every point in time that they hold into the past."""

import os
import sqlite3
from pathlib import Path

DAY_S = 86_400
BUSY_S = 120.0


def age_files(folder: Path, days: float) -> None:
    """Make everything below `folder` older."""
    for path in [folder, *folder.rglob("*")]:
        try:
            then = path.stat().st_mtime - days * DAY_S
            os.utime(path, (then, then))
        except FileNotFoundError:  # a server's temporary file
            continue


def age_prefect(database: Path, days: float) -> None:
    """Make flow runs, events and all else in Prefect's SQLite file older; times there are texts in UTC."""
    with sqlite3.connect(database, timeout=BUSY_S) as connection:
        for table, column, kind in _columns(connection):
            if kind in ("TIMESTAMP", "DATETIME") and column not in ("total_run_time", "estimated_run_time"):
                # The fraction of a second stays as it is: SQLite would round it, and states are unique by their time.
                moved = f'datetime(substr("{column}", 1, 19), \'-{days} days\') || substr("{column}", 20)'
                connection.execute(f'UPDATE "{table}" SET "{column}" = {moved} WHERE "{column}" IS NOT NULL')


def age_mlflow(database: Path, days: float) -> None:
    """Make runs, models and versions in MLflow's SQLite file older; times there are milliseconds since 1970."""
    with sqlite3.connect(database, timeout=BUSY_S) as connection:
        for table, column, kind in _columns(connection):
            if kind == "BIGINT" and column.endswith(("_time", "_timestamp", "_timestamp_ms")):
                connection.execute(
                    f'UPDATE "{table}" SET "{column}" = "{column}" - {int(days * DAY_S * 1000)} WHERE "{column}" > 0'
                )


def _columns(connection: sqlite3.Connection) -> list[tuple[str, str, str]]:
    """(table, column, declared type) of the whole database."""
    tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    return [
        (table, row[1], row[2].upper())
        for table in tables
        for row in connection.execute(f'PRAGMA table_info("{table}")')
    ]
