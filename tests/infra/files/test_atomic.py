"""What is written takes its place whole, or leaves nothing."""

import errno
import os
import stat
from pathlib import Path

import pytest

from infra.files.atomic import replacing, write_atomically


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "record"
    write_atomically(file, "old")

    def interrupt() -> None:
        with replacing(file) as new:
            new.write(b"half")
            raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space left"):
        interrupt()
    assert list(tmp_path.iterdir()) == [file]
    assert file.read_text() == "old"


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_syncs_no_folder_takes_files(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of FUSE and SMB: the rename has taken place."""
    fsync = os.fsync

    def refuse(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    write_atomically(tmp_path / "record", "new")
    assert (tmp_path / "record").read_text() == "new"
    code = errno.EIO
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        write_atomically(tmp_path / "record", "newer")
