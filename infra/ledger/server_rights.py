"""What a PostgreSQL that somebody else runs must allow before a ledger can be in it."""

import sqlalchemy as sa

from infra.ledger.schema import metadata
from infra.refusal import Refusal

HOLDS_ALL_TEXT = ("UTF8", "SQL_ASCII")
"""Encodings that keep every character. SQL_ASCII, of databases made without a locale, keeps bytes as they come."""
RIGHTS = ("SELECT", "INSERT", "UPDATE", "DELETE")


def refuse_unusable_database(connection: sa.Connection) -> None:
    """Raise Refusal, with the statement that helps, where the ledger's tables cannot be made or written."""
    place = f"ledger.url: the database of {connection.engine.url.render_as_string()}"
    columns = "current_setting('transaction_read_only'), current_setting('server_encoding'), current_schema()"
    read_only, encoding, schema = connection.exec_driver_sql(f"SELECT {columns}").one()
    if read_only == "on":
        raise Refusal(f"{place} can only be read: name the primary server, or a database without "
                      "default_transaction_read_only")  # fmt: skip
    if encoding not in HOLDS_ALL_TEXT:
        raise Refusal(f"{place} has the encoding {encoding}: name one made with CREATE DATABASE ... ENCODING 'UTF8' "
                      "TEMPLATE template0")  # fmt: skip
    if schema is None:
        raise Refusal(f"{place}: no schema of its search_path exists: make one (CREATE SCHEMA), or correct the path")
    _refuse_missing_rights(connection, place, schema)


def _refuse_missing_rights(connection: sa.Connection, place: str, schema: str) -> None:
    user = _quoted(connection, connection.exec_driver_sql("SELECT current_user").scalar_one())
    tables = sorted(metadata.tables)
    found = set(sa.inspect(connection).get_table_names())
    may_make = sa.text("SELECT has_schema_privilege(:schema, 'CREATE')")
    if not found.issuperset(tables) and not connection.execute(may_make, {"schema": schema}).scalar():
        raise Refusal(f"{place}: its user may not make tables in the schema {schema}: "
                      f"GRANT CREATE ON SCHEMA {_quoted(connection, schema)} TO {user}")  # fmt: skip
    may = sa.text("SELECT has_table_privilege(:name, :right)")
    names = {name: f"{_quoted(connection, schema)}.{_quoted(connection, name)}" for name in tables if name in found}
    if not all(
        connection.execute(may, {"name": name, "right": right}).scalar() for name in names.values() for right in RIGHTS
    ):
        raise Refusal(f"{place}: its user may not write the ledger's tables: "
                      f"GRANT {', '.join(RIGHTS)} ON {', '.join(names.values())} TO {user}")  # fmt: skip


def _quoted(connection: sa.Connection, name: str) -> str:
    return connection.dialect.identifier_preparer.quote_identifier(name)
