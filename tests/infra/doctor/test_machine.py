"""What the doctor says of file systems and limits that few machines have."""

import errno
import fcntl
import os
import resource
from pathlib import Path

import pytest

from infra.doctor import machine


def test_a_folder_without_locks_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    finding = machine.file_locks(tmp_path)
    assert (finding.verdict, f"{tmp_path} is on a file system without locks" in finding.found) == ("problem", True)


def test_the_first_folder_that_is_not_right_is_named(tmp_path: Path) -> None:
    held, no_files = tmp_path / "runs", Path("/proc/cache")  # not even root makes files there
    finding = machine.file_locks(held, no_files)
    assert (finding.verdict, "/proc" in finding.found) == ("problem", True)
    assert machine.file_locks(held, tmp_path).found == f"held on {tmp_path}, and its clock agrees with this machine's"


@pytest.mark.parametrize(
    ("limit", "verdict", "said"),
    [(256, "note", "at most 256"), (1024, "ok", "1024"), (resource.RLIM_INFINITY, "ok", "unlimited")],
)
def test_processes(limit: int, verdict: str, said: str) -> None:
    finding = machine.processes(limit)
    assert (finding.verdict, said in finding.found) == (verdict, True)
