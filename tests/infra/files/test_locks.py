"""Locks end with their holders; folders with their owners."""

import errno
import fcntl
import os
import stat
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from infra.files.locks import LockHeldError, hold, own_folder, sweep
from infra.refusal import Refusal

HOLDER = """
import sys, time
from pathlib import Path
from infra.files.locks import own_folder
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


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_refused(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lustre without -o flock, NFS without its lock service: only a mount of one shows it, and takes root."""

    def refuse(_descriptor: int, _operation: int) -> None:
        raise OSError(code, os.strerror(code))

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(fcntl, "flock", refuse)
    message = rf"{tmp_path / 'lock'} is on a file system without locks .*\$DRAFTSMITH_RUNS, \$DRAFTSMITH_CACHE"
    with pytest.raises(Refusal, match=message), hold(tmp_path / "lock"):
        pass
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_owned_folder_is_kept_from_sweeps_and_goes_with_its_owner(tmp_path: Path) -> None:
    with own_folder(tmp_path / "draftsmith-a"):
        (tmp_path / "draftsmith-a" / "objects").mkdir()
        assert sweep(tmp_path) == []
        with pytest.raises(LockHeldError), own_folder(tmp_path / "draftsmith-a"):
            pass
        assert (tmp_path / "draftsmith-a" / "objects").is_dir()
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_somebody_else_took_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In /dev/shm any user can make what a run will want."""
    place, other = tmp_path / "draftsmith-a", tmp_path / "other"
    other.mkdir()
    place.symlink_to(other)
    with (
        pytest.raises(Refusal, match=r"draftsmith-a is a link or a file of user \d+.*DRAFTSMITH_SHM"),
        own_folder(place),
    ):
        pass
    place.unlink()
    place.mkdir()
    monkeypatch.setattr(os, "getuid", lambda: place.stat().st_uid + 1)
    with pytest.raises(Refusal, match=r"draftsmith-a is a folder of user \d+.*DRAFTSMITH_SHM"), own_folder(place):
        pass
    tmp_path.chmod(0o2770)  # shared among a group, whose members continue each other's runs
    with own_folder(place):
        pass
    assert list(tmp_path.iterdir()) == [other]


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


def test_a_folder_that_lost_its_lock_is_swept_when_it_is_old(tmp_path: Path) -> None:
    """Systemd empties the shared memory of a user who logs out; what restarts meanwhile has no lock to show."""
    living, old, half_removed = (tmp_path / name for name in ("draftsmith-a", "draftsmith-b", "draftsmith-c.gone-1"))
    for folder in (living, old, half_removed):
        (folder / "objects").mkdir(parents=True)
    then = time.time() - 2 * 86_400
    os.utime(old, (then, then))
    assert sorted(sweep(tmp_path)) == [old, half_removed]
    assert (living / "objects").is_dir()


def test_a_folder_that_another_sweep_removes_meanwhile_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "draftsmith-a").mkdir()
    listed = list(tmp_path.glob("draftsmith-*"))
    exists = Path.exists

    def removed_meanwhile(path: Path, **options: bool) -> bool:
        if path.name == "lock" and path.parent.is_dir():
            path.parent.rmdir()
        return exists(path, **options)

    monkeypatch.setattr(Path, "exists", removed_meanwhile)
    assert sweep(tmp_path) == listed


@pytest.mark.parametrize(("parent", "umask", "mode"), [(0o755, 0o022, 0o700), (0o2775, 0o002, 0o2770)])
def test_an_owned_folder_is_closed_to_other_users(parent: int, umask: int, mode: int, tmp_path: Path) -> None:
    tmp_path.chmod(parent)
    before = os.umask(umask)
    try:
        with own_folder(tmp_path / "draftsmith-a"):
            assert stat.S_IMODE((tmp_path / "draftsmith-a").stat().st_mode) == mode
    finally:
        os.umask(before)


def test_a_dead_owners_folder_is_taken_over_empty(tmp_path: Path) -> None:
    (tmp_path / "draftsmith-a" / "objects").mkdir(parents=True)
    with own_folder(tmp_path / "draftsmith-a"):
        assert [path.name for path in (tmp_path / "draftsmith-a").iterdir()] == ["lock"]


def test_a_sweep_that_opened_the_lock_of_a_removed_folder_spares_the_new_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old owner ends, and a new one starts, between the sweep's open and its flock."""
    folder = tmp_path / "draftsmith-a"
    old, new = ExitStack(), ExitStack()
    old.enter_context(own_folder(folder))
    flock = fcntl.flock

    def change_owners(descriptor: int, operation: int) -> None:
        monkeypatch.undo()
        old.close()
        new.enter_context(own_folder(folder))
        (folder / "objects").mkdir()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", change_owners)
    assert sweep(tmp_path) == []
    assert (folder / "objects").is_dir()
    new.close()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_whose_file_was_replaced_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, flock, other = tmp_path / "lock", fcntl.flock, ExitStack()

    def replace(descriptor: int, operation: int) -> None:
        monkeypatch.undo()
        path.unlink()
        other.enter_context(hold(path))
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", replace)
    with pytest.raises(LockHeldError), hold(path):
        pass
    other.close()


def test_a_held_lock_is_open_for_writing(tmp_path: Path) -> None:
    """NFS gives an exclusive flock only to such a descriptor."""
    for _ in range(2):  # the first one makes the file
        with hold(tmp_path / "lock") as lock:
            assert fcntl.fcntl(lock.descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR


@pytest.mark.parametrize(("umask", "mode"), [(0o002, 0o664), (0o022, 0o644), (0o077, 0o600)])
def test_a_group_that_shares_a_folder_shares_its_locks(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        with hold(tmp_path / "lock"):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "lock").stat().st_mode) == mode


def test_a_folder_of_every_user_s_locks(tmp_path: Path) -> None:
    path = tmp_path / "gpus" / "GPU-aa.lock"
    before = os.umask(0o077)
    try:
        with hold(path, for_everybody=True):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o1777
    assert stat.S_IMODE(path.stat().st_mode) == 0o666
    assert [file.name for file in path.parent.iterdir()] == ["GPU-aa.lock"]


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP])
def test_a_file_system_without_links_holds_every_user_s_locks(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    path = tmp_path / "ports" / "21000"
    before = os.umask(0o077)
    try:
        with hold(path, for_everybody=True), pytest.raises(LockHeldError), hold(path, for_everybody=True):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666
    assert [file.name for file in path.parent.iterdir()] == ["21000"]


def test_links_are_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "gpus").symlink_to(elsewhere)
    with pytest.raises(NotADirectoryError), hold(tmp_path / "gpus" / "GPU-aa.lock", for_everybody=True):
        pass
    (tmp_path / "lock").symlink_to(elsewhere / "made")
    with pytest.raises(OSError, match="symbolic links"), hold(tmp_path / "lock"):
        pass
    (elsewhere / "draftsmith-a").mkdir()
    (tmp_path / "draftsmith-a").symlink_to(elsewhere / "draftsmith-a")
    assert sweep(tmp_path) == []
    assert [path.name for path in elsewhere.rglob("*")] == ["draftsmith-a"]
