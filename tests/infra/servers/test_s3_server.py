"""The S3 server of a stack, killed in the middle of an upload."""

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import psutil
import pytest

from infra.processes.process import Owner
from infra.servers.s3 import S3Server

pytestmark = pytest.mark.slow
SIZE = 96 * 2**20


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    monkeypatch.setattr("infra.servers.s3.START_S", 240.0)  # a busy machine
    folder = tmp_path / ("long" * 30) / "s3"  # no path of a socket in it would fit into the kernel's 107 bytes
    killed = set(Path("/tmp").glob("seaweedfs-*.sock"))
    started = S3Server(folder, Owner("tests", tmp_path / "logs"))
    yield started
    started.stop()
    ports = started.access.ports.values()
    assert [
        path for port in ports for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock") if path not in killed
    ] == []


@pytest.fixture
def files(server: S3Server) -> Any:
    access = server.access
    return fsspec.filesystem(
        "s3", endpoint_url=access.address, key=access.access_key, secret=access.secret_key, skip_instance_cache=True
    )


def program(server: S3Server) -> psutil.Process:
    (found,) = psutil.Process(server.process.pid).children()
    return found


def test_an_upload_is_whole_or_not_there(server: S3Server, files: Any, tmp_path: Path) -> None:
    files.mkdir("bucket")
    source, back = tmp_path / "weights", tmp_path / "back"
    source.write_bytes(os.urandom(SIZE))
    files.put_file(str(source), "bucket/before")
    with ThreadPoolExecutor(1) as threads:
        sent = program(server).io_counters().read_chars
        upload = threads.submit(files.put_file, str(source), "bucket/interrupted")
        while program(server).io_counters().read_chars - sent < SIZE // 4 and not upload.done():
            time.sleep(0.005)
        os.kill(program(server).pid, signal.SIGKILL)
        server.process.stop()
        server.start()
        failed = upload.exception(timeout=200) is not None
    files.invalidate_cache()
    if not failed or files.exists("bucket/interrupted"):
        assert files.cat("bucket/interrupted") == source.read_bytes()
    files.put_file(str(source), "bucket/interrupted")
    for name in ("before", "interrupted"):
        files.get_file(f"bucket/{name}", str(back))
        assert back.read_bytes() == source.read_bytes()


def test_strangers_and_other_machines_stay_out(server: S3Server) -> None:
    stranger = fsspec.filesystem(
        "s3", endpoint_url=server.access.address, key="somebody", secret="else", skip_instance_cache=True
    )
    with pytest.raises(PermissionError):
        stranger.ls("")
    addresses = {
        connection.laddr.ip for connection in program(server).net_connections() if connection.status == "LISTEN"
    }
    assert addresses == {"127.0.0.1"}
    assert (server.folder / "access.json").stat().st_mode & 0o077 == 0
