"""How often a run that dies may be started again."""

from pathlib import Path

from infra.files.locks import hold
from infra.files.run_folder import RunFolder
from infra.run.ownership import is_owned
from infra.run.recovery import ATTEMPTS, newest_step, note_recovery


def test_three_times_without_a_new_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert all(note_recovery(folder, f"first-{number}", 0) for number in range(ATTEMPTS))
    assert not note_recovery(folder, "one-too-many", 0)
    assert not note_recovery(folder, "and-another", 0)


def test_a_new_checkpoint_earns_new_starts(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for step in (0, 10, 20):
        assert all(note_recovery(folder, f"{step}-{number}", step) for number in range(ATTEMPTS))
    assert not note_recovery(folder, "one-too-many", 20)


def test_the_same_death_counts_once(tmp_path: Path) -> None:
    """Worker and heartbeat may both say that a flow died."""
    folder = RunFolder(tmp_path)
    assert all(note_recovery(folder, "same", 0) for _ in range(ATTEMPTS + 2))
    assert note_recovery(folder, "other", 0)


def test_a_run_without_a_ledger_has_no_checkpoint(tmp_path: Path) -> None:
    assert newest_step(RunFolder(tmp_path), None) == 0


def test_a_run_is_owned_while_its_lock_is_held(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert not is_owned(folder)
    assert list(tmp_path.iterdir()) == []
    with hold(folder.run_lock):
        assert is_owned(folder, wait_s=0)
    with hold(folder.processes_lock):
        assert is_owned(folder, wait_s=0)
