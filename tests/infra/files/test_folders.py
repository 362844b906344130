"""Folders that cannot be created."""

import errno
import os
from pathlib import Path

import pytest

from infra.files.cached_folder import build_once
from infra.files.folders import check_working_folder, make_folder
from infra.files.locks import hold
from infra.processes.process import Owner, start
from infra.refusal import Refusal
from infra.servers.postgres import NOBODY


def lock(folder: Path) -> None:
    with hold(folder / "a.lock"):
        pass


def start_process(folder: Path) -> None:
    start("a", ["true"], Owner("me", folder))


def build(folder: Path) -> None:
    build_once(folder / "a", lambda _: None)


@pytest.mark.parametrize("begin", [make_folder, lock, start_process, build])
@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.EACCES, "start in a folder that you may write to"),
        (errno.EROFS, "start in a folder that you may write to"),
        (errno.ENOSPC, "free some space"),
        (errno.EDQUOT, "free some space"),
    ],
)
def test_a_folder_that_the_user_may_not_create_is_refused(
    code: int, remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin
) -> None:
    def denied(folder: Path, *_arguments: object, **_options: object) -> None:
        raise OSError(code, os.strerror(code), str(folder))

    monkeypatch.setattr(Path, "mkdir", denied)
    message = rf"runs cannot be created \({os.strerror(code)}\): {remedy}, or .*DRAFTSMITH_RUNS"
    with pytest.raises(Refusal, match=message):
        begin(tmp_path / "runs")


def test_a_working_folder_that_the_user_may_not_enter_is_refused(
    public_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `sudo -u` from a home folder."""
    monkeypatch.chdir(public_folder)
    check_working_folder()
    public_folder.chmod(0)
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        with pytest.raises(Refusal, match=r"\(Permission denied\): start in a folder that you may enter"):
            check_working_folder()
    finally:
        os.seteuid(before)
        public_folder.chmod(0o700)


def test_other_faults_of_a_disk_are_no_refusals(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        make_folder(tmp_path / "file")
