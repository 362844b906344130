"""A small run on a real SQLite file, and on a real PostgreSQL."""

import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.ledger.ledger import Ledger
from infra.records.data_path import BufferRecord, Lease, ObjectRecord, SampleSlot

sys.path.append(str(Path(__file__).parent))  # test modules import ledger_model from this folder


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'ledger.sqlite'}"


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, sqlite_url: str) -> str:
    if request.param == "sqlite":
        return sqlite_url
    return request.getfixturevalue("postgres").make_database(uuid.uuid4().hex)


@pytest.fixture
def ledger(url: str) -> Iterator[Ledger]:
    """Strict order, 10 bytes per token, room for 100 bytes, two attempts."""
    with Ledger.open(url, "run") as ledger:
        ledger.create_run(budget_bytes=100, bytes_per_token=10, lease_seconds=60, max_attempts=2, order="strict")
        yield ledger


@pytest.fixture
def slots() -> Callable[..., list[SampleSlot]]:
    """Slots of samples with these numbers of tokens."""

    def of(*tokens: int) -> list[SampleSlot]:
        return [SampleSlot(ordinal=i, sample=100 + i, tokens=count) for i, count in enumerate(tokens)]

    return of


@pytest.fixture
def captured() -> Callable[[Ledger, Lease], ObjectRecord]:
    """The object that a generator would write under a lease."""

    def of(ledger: Ledger, lease: Lease) -> ObjectRecord:
        buffer = BufferRecord(name="aux", nbytes=lease.nbytes, xxh3=f"{lease.sample:016x}")
        return ObjectRecord(key=ledger.key(lease), location="memory", buffers=(buffer,))

    return of
