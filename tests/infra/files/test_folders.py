"""Folders that cannot be created."""

import errno
from pathlib import Path

import pytest

from infra.files.folders import make_folder
from infra.files.locks import hold
from infra.processes.process import Owner, start
from infra.refusal import Refusal


def lock(folder: Path) -> None:
    with hold(folder / "a.lock"):
        pass


@pytest.mark.parametrize("begin", [make_folder, lock, lambda folder: start("a", ["true"], Owner("me", folder))])
def test_a_folder_that_the_user_may_not_create_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin
) -> None:
    def denied(folder: Path, *_arguments: object, **_options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    monkeypatch.setattr(Path, "mkdir", denied)
    with pytest.raises(Refusal, match=r"runs cannot be created \(Permission denied\): start in a folder "):
        begin(tmp_path / "runs")


def test_other_faults_of_a_disk_are_no_refusals(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileExistsError):
        make_folder(tmp_path / "file")
