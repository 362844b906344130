"""Locks end with their holders; folders with their owners."""

import subprocess
import sys
from pathlib import Path

import pytest

from infra.locks import LockHeldError, hold, own_folder, sweep

HOLDER = """
import sys, time
from pathlib import Path
from infra.locks import own_folder
with own_folder(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_one_wins_and_the_other_says_so(tmp_path: Path) -> None:
    with hold(tmp_path / "lock"):
        with pytest.raises(LockHeldError, match="lock"), hold(tmp_path / "lock", wait_s=0.2):
            pass
    with hold(tmp_path / "lock"):
        pass


def test_an_owned_folder_is_kept_from_sweeps_and_goes_with_its_owner(tmp_path: Path) -> None:
    with own_folder(tmp_path / "draftsmith-a"):
        (tmp_path / "draftsmith-a" / "objects").mkdir()
        assert sweep(tmp_path) == []
        with pytest.raises(LockHeldError), own_folder(tmp_path / "draftsmith-a"):
            pass
        assert (tmp_path / "draftsmith-a" / "objects").is_dir()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_owner_left_is_swept_and_nothing_else(tmp_path: Path) -> None:
    dead, other = tmp_path / "draftsmith-dead", tmp_path / "somebody-else"
    other.mkdir()
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(dead)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert sweep(tmp_path) == []
        holder.kill()
    with own_folder(tmp_path / "draftsmith-alive"):
        assert sweep(tmp_path) == [dead]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["draftsmith-alive", "somebody-else"]


def test_a_dead_owners_folder_is_taken_over_empty(tmp_path: Path) -> None:
    (tmp_path / "draftsmith-a" / "objects").mkdir(parents=True)
    with own_folder(tmp_path / "draftsmith-a"):
        assert [path.name for path in (tmp_path / "draftsmith-a").iterdir()] == ["lock"]
