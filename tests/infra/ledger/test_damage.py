"""Damaged SQLite files are noticed and set aside; whole ones are left alone."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.ledger.database import set_aside_if_damaged
from infra.ledger.ledger import Ledger
from infra.records.data_path import SampleProgress, SampleSlot

SAMPLES = 2000


def ledger_with_samples(file: Path) -> None:
    with Ledger.open(f"sqlite:///{file}", "run") as ledger:
        ledger.create_run(budget_bytes=100, bytes_per_token=10, lease_seconds=60, max_attempts=2, order="strict")
        ledger.open_epoch(None, 0, [SampleSlot(ordinal=i, sample=i, tokens=1) for i in range(SAMPLES)])


def zero_the_second_half(data: bytes) -> bytes:
    return data[: len(data) // 2] + bytes(len(data) - len(data) // 2)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:-100],
        lambda data: bytes(len(data)),
        zero_the_second_half,
    ],
    ids=["half", "torn", "zeroed", "second half zeroed"],
)
def test_a_damaged_ledger_is_set_aside(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    file = tmp_path / "ledger.sqlite"
    ledger_with_samples(file)
    file.write_bytes(damage(file.read_bytes()))
    aside = set_aside_if_damaged(file)
    assert aside is not None
    assert aside.is_file()
    assert not file.exists()
    with Ledger.open(f"sqlite:///{file}", "run") as ledger:
        assert ledger.progress() == SampleProgress()


def test_a_whole_ledger_stays(tmp_path: Path) -> None:
    file = tmp_path / "ledger.sqlite"
    assert set_aside_if_damaged(file) is None, "there is none yet"
    ledger_with_samples(file)
    assert set_aside_if_damaged(file) is None
    with Ledger.open(f"sqlite:///{file}", "run") as ledger:
        assert ledger.progress().pending == SAMPLES


WRITES = """
import sys
from infra.ledger.ledger import Ledger
from infra.records.data_path import SampleSlot
with Ledger.open(sys.argv[1], "run") as ledger:
    ledger.open_epoch(None, 0, [SampleSlot(ordinal=0, sample=0, tokens=1)])
"""


def test_a_second_opening_does_not_take_the_first_one_s_locks(tmp_path: Path) -> None:
    """Without them, another process that closes the file thinks it is the last one, and removes the log in use."""
    url = f"sqlite:///{tmp_path / 'ledger.sqlite'}"
    with Ledger.open(url, "run") as first:
        first.create_run(budget_bytes=100, bytes_per_token=10, lease_seconds=60, max_attempts=2, order="strict")
        with Ledger.open(url, "run") as second:
            assert second.progress() == SampleProgress()
        subprocess.run([sys.executable, "-c", WRITES, url], check=True, timeout=300)
        assert (tmp_path / "ledger.sqlite-wal").is_file()
        assert first.progress() == SampleProgress(pending=1)
