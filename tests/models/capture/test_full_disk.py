"""A generator whose objects' file system fills up while it captures: it waits, and no sample is blamed."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.files.run_folder import RunFolder
from infra.records.data_path import SampleProgress
from models.run import PreparedRun

SAMPLES = 500
MOUNT = 'mount -t tmpfs -o size=96m none "$0" && exec "$@"'


@pytest.fixture
def start_in_a_small_file_system(
    own_namespaces: None,
) -> Iterator[Callable[[Path, RunFolder], "subprocess.Popen[str]"]]:
    """Starts a generator in a mount namespace of its own, which needs no rights, with 96 MiB at a folder."""
    started: list[subprocess.Popen[str]] = []

    def start(folder: Path, run: RunFolder) -> "subprocess.Popen[str]":
        folder.mkdir()
        command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", MOUNT, str(folder)]
        command += [sys.executable, "-m", "models.capture.generator", str(run.path)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate(timeout=30)


def test_a_full_file_system_quarantines_no_sample(
    make_run: Callable[..., RunFolder],
    start_in_a_small_file_system: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """Room for the first objects only, then for none, then for all: 500 of 500 are captured."""
    folder = tmp_path / "small"
    run = PreparedRun.open(
        make_run(
            "run",
            f"data.max_samples={SAMPLES}",
            "data.max_tokens=32",
            "transport.kind=files",
            f"transport.folder={folder}",
        ).path
    )
    generator = start_in_a_small_file_system(folder, run.folder)
    assert any("ready after" in line for line in generator.stdout)
    inside = Path(f"/proc/{generator.pid}/root") / folder.relative_to("/")
    filler = inside / "filler"
    room = os.statvfs(inside)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, room.f_frsize * room.f_bavail - 2**19)
    ledger = run.open_ledger()
    ledger.open_epoch(None, 0, run.epoch_slots(0))
    said = next(line for line in generator.stdout if "sample" in line or "full" in line)
    assert "waiting up to 60 s: no room" in said
    assert f"the file system of {folder}" in said
    filler.unlink()
    deadline = time.monotonic() + 300
    while ledger.progress().ready < SAMPLES and time.monotonic() < deadline:
        assert generator.poll() is None, generator.stdout.read()
        time.sleep(0.1)
    progress = ledger.progress()
    assert progress == SampleProgress(ready=SAMPLES, bytes_held=progress.bytes_held)
