"""A cached folder is built by one, whole or not at all."""

import errno
import fcntl
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from infra.files.cached_folder import build_once
from infra.refusal import Refusal


def test_of_several_builders_one_builds_and_the_others_wait(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "thing"
    together = threading.Barrier(3, timeout=120)
    seen_by_builder: list[bool] = []

    def build(aside: Path) -> None:
        seen_by_builder.append(folder.exists())
        (aside / "part").mkdir()
        (aside / "part" / "file").write_text("whole")

    def run(_: int) -> tuple[bool, str]:
        together.wait()
        built = build_once(folder, build)
        return built, (folder / "part" / "file").read_text()

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(run, range(3)))
    assert sorted(results) == [(False, "whole"), (False, "whole"), (True, "whole")]
    assert seen_by_builder == [False]


def test_a_failed_build_leaves_nothing_and_the_next_one_starts_clean(tmp_path: Path) -> None:
    folder = tmp_path / "thing"

    def fail(aside: Path) -> None:
        (aside / "half").write_text("half")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        build_once(folder, fail)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []

    left_by_a_dead_process = tmp_path / ".thing.building"
    left_by_a_dead_process.mkdir()
    (left_by_a_dead_process / "half").write_text("half")
    assert build_once(folder, lambda aside: (aside / "file").touch())
    assert [path.name for path in folder.iterdir()] == ["file"]
    assert not build_once(folder, fail)


def test_a_filled_cache_may_be_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "thing"
    assert build_once(folder, lambda aside: (aside / "file").touch())

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", refuse)  # what a read-only file system answers; mounting one takes root
    assert not build_once(folder, lambda _: None)


def test_a_cache_without_locks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock file that a killed builder leaves would keep everybody from building there."""

    def refuse(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(Refusal, match=r"a file system without locks .*\$DRAFTSMITH_CACHE"):
        build_once(tmp_path / "thing", lambda _: None)
    assert not (tmp_path / "thing").exists()


def test_waiting_for_another_builder_ends(tmp_path: Path) -> None:
    folder = tmp_path / "thing"

    def impatient(aside: Path) -> None:
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(build_once, folder, lambda _: None, 0.05)
            with pytest.raises(ValueError, match="another process has been building"):
                other.result(timeout=120)
        (aside / "file").touch()

    assert build_once(folder, impatient)
