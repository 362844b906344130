"""When a run stops because too many of its samples are quarantined."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.data_plane.watch import RunWatch, check_quarantined
from infra.ledger.ledger import Ledger
from infra.records.data_path import SampleSlot
from infra.refusal import Refusal


@pytest.fixture
def open_ledger(tmp_path: Path) -> Iterator[Callable[[int, int], Ledger]]:
    """A ledger with `samples` samples, some of which are quarantined in two epochs."""
    opened: list[Ledger] = []

    def make(total: int, bad: int) -> Ledger:
        ledger = Ledger.open(f"sqlite:///{tmp_path / f'{total}-{bad}.sqlite'}", "run")
        opened.append(ledger)
        ledger.create_run(budget_bytes=2**20, bytes_per_token=1, lease_seconds=60, max_attempts=1, order="strict")
        slots = [SampleSlot(ordinal=i, sample=i, tokens=1) for i in range(total)]
        ledger.open_epoch(None, 0, slots)
        for lease in ledger.lease("g", bad):
            ledger.fail(lease, "last has values that are not finite")
        ledger.open_epoch(None, 1, slots)
        return ledger

    yield make
    for ledger in opened:
        ledger.close()


@pytest.mark.parametrize(
    ("total", "bad", "share"), [(36, 1, 0.01), (99, 1, 0.01), (300, 3, 0.01), (10, 5, 0.5), (10, 10, 1.0), (10, 0, 0.0)]
)
def test_as_many_as_the_limit_allows(open_ledger: Callable[[int, int], Ledger], total, bad, share) -> None:
    check_quarantined(open_ledger(total, bad), share)


@pytest.mark.parametrize(("total", "bad", "share"), [(36, 2, 0.01), (300, 4, 0.01), (10, 6, 0.5), (10, 1, 0.0)])
def test_more_than_the_limit_stop_the_run(open_ledger: Callable[[int, int], Ledger], total, bad, share) -> None:
    with pytest.raises(Refusal) as refused:
        RunWatch(open_ledger(total, bad), 0.0, share).check()
    message = str(refused.value)
    assert message.startswith(f"{bad} of {total} samples ({bad / total:.1%}) are quarantined")
    assert f"ledger.max_quarantined={share:g}" in message
    assert "sample 0: last has values that are not finite" in message
    assert "start a new run" in message
