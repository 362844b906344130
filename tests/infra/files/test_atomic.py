"""What is written takes its place whole, or leaves nothing."""

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
