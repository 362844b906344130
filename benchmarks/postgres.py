"""What benchmarks and tests do to a PostgreSQL of their own."""

import psutil
import sqlalchemy as sa

from infra.files.atomic import write_atomically
from infra.servers.postgres import PostgresServer


def kill(server: PostgresServer) -> None:
    """`kill -9`, as a crash would; returns when nothing of the server is left."""
    for postmaster in psutil.Process(server.process.pid).children():
        postmaster.kill()
    server.process.stop()


def recipe_url(server: PostgresServer, database: str) -> str:
    """The URL for a recipe: clients find the password in a file that this user alone may read."""
    url, file = sa.make_url(server.url(database)), server.folder / "pgpass"
    write_atomically(file, f"{url.host}:{url.port}:*:{url.username}:{url.password}\n", mode=0o600)
    query = {"passfile": str(file)}
    return sa.URL.create(url.drivername, url.username, None, url.host, url.port, database, query).render_as_string()
