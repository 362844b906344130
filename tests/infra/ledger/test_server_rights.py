"""A PostgreSQL that somebody else runs: users with few rights, databases with settings and encodings of their own."""

import uuid
from collections.abc import Callable

import pytest
import sqlalchemy as sa

from infra.ledger.database import check_server
from infra.ledger.ledger import Ledger
from infra.ledger.schema import metadata
from infra.network.ports import HOST
from infra.refusal import Refusal
from infra.servers.postgres import PostgresServer

PASSWORD = "p@ss/w%rd:#?"


class Admin:
    """A database of a server, and a user who owns nothing in it."""

    def __init__(self, server: PostgresServer, encoding: str) -> None:
        self.server, self.database, self.user = server, uuid.uuid4().hex, f"o'user@{uuid.uuid4().hex}"
        self.run("postgres", f"CREATE ROLE \"{self.user}\" LOGIN PASSWORD '{PASSWORD}'")
        self.run("postgres", f"CREATE DATABASE \"{self.database}\" ENCODING '{encoding}' TEMPLATE template0")

    def run(self, database: str, *statements: str) -> None:
        engine = sa.create_engine(
            self.server.url(database),
            poolclass=sa.NullPool,
            isolation_level="AUTOCOMMIT",
            connect_args={"client_encoding": "utf8"},
        )
        with engine.connect() as connection:
            for statement in statements:
                connection.execute(sa.text(statement))

    def grant(self, *rights: str) -> None:
        """Each as `RIGHTS ON OBJECT`."""
        self.run(self.database, *(f'GRANT {right} TO "{self.user}"' for right in rights))

    @property
    def url(self) -> str:
        """Without the password."""
        address = sa.make_url(self.server.url(self.database))
        return sa.URL.create("postgresql", self.user, None, HOST, address.port, self.database).render_as_string()


@pytest.fixture
def admin(postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Admin]:
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    return lambda encoding="UTF8": Admin(postgres, encoding)


def test_a_user_may_need_the_right_to_make_tables(admin: Callable[..., Admin]) -> None:
    """From PostgreSQL 15 on nobody but a database's owner may make tables in its schema public."""
    server = admin()
    with pytest.raises(Refusal, match=rf'may not make tables .*: GRANT CREATE ON SCHEMA "public" TO "{server.user}"'):
        check_server(server.url)
    server.grant("CREATE ON SCHEMA public")
    check_server(server.url)
    Ledger.open(server.url, "run").close()
    check_server(server.url)


def test_tables_of_another_user_must_be_open_for_writing(admin: Callable[..., Admin]) -> None:
    server = admin()
    Ledger.open(server.server.url(server.database), "run").close()
    with pytest.raises(Refusal, match=rf'GRANT SELECT, INSERT, UPDATE, DELETE ON .*"runs".* TO "{server.user}"'):
        check_server(server.url)
    server.grant(*(f"SELECT, INSERT, UPDATE, DELETE ON {name}" for name in metadata.tables))
    check_server(server.url)
    Ledger.open(server.url, "run").close()


def test_a_schema_must_be_there(admin: Callable[..., Admin]) -> None:
    with pytest.raises(Refusal, match="no schema of its search_path exists"):
        check_server(f"{admin().url}?options=-csearch_path%3Dnowhere")


def test_a_database_that_can_only_be_read_is_refused(admin: Callable[..., Admin]) -> None:
    """As a replica can."""
    server = admin()
    server.grant("CREATE ON SCHEMA public")
    server.run("postgres", f'ALTER DATABASE "{server.database}" SET default_transaction_read_only = on')
    with pytest.raises(Refusal, match="can only be read: name the primary server"):
        check_server(server.url)


def test_a_database_without_an_encoding_holds_a_ledger(admin: Callable[..., Admin]) -> None:
    """`initdb` in a container without a locale makes such ones."""
    server = admin("SQL_ASCII")
    server.grant("CREATE ON SCHEMA public")
    check_server(server.url)
    with Ledger.open(server.url, "lauf-ü漢") as ledger:
        ledger.create_run(budget_bytes=100, bytes_per_token=10, lease_seconds=60, max_attempts=2, order="strict")
        assert ledger.run == "lauf-ü漢"
        assert not ledger.progress().quarantined


def test_a_database_whose_encoding_lacks_characters_is_refused(admin: Callable[..., Admin]) -> None:
    with pytest.raises(Refusal, match=r"has the encoding LATIN1: .*ENCODING 'UTF8'"):
        check_server(admin("LATIN1").url)
