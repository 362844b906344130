"""The S3 server of a stack, killed in the middle of an upload."""

import os
import re
import signal
import socket
import ssl
import subprocess
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import httpx
import psutil
import pytest

from infra.processes.process import Owner
from infra.servers.s3 import PARTS, S3Server, write_security

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
    return client(server)


def client(server: S3Server) -> Any:
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


def speak_without_certificate(port: int) -> bytes:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])  # gRPC's
    with socket.create_connection(("127.0.0.1", port), timeout=60) as plain, context.wrap_socket(plain) as secured:
        return secured.recv(1)


def file_id(server: S3Server, path: str) -> str:
    """The name in its volume of a file's first piece, which the stack's user may ask."""
    master, filer = (
        f"127.0.0.1:{server.access.ports[part]}.{server.access.ports[f'{part}-grpc']}" for part in ("master", "filer")
    )
    shell = [*program(server).cmdline()[:2], "shell", f"-master={master}", f"-filer={filer}"]
    said = subprocess.run(shell, input=f"fs.meta.cat {path}\n", capture_output=True, text=True, timeout=240, check=True)
    found = re.search(r'"fileId":\s*"(.*?)"', said.stdout)
    assert found, said.stdout
    return found[1]


def test_objects_are_not_reached_around_s3(server: S3Server, files: Any) -> None:
    """Any user, or a page in a browser, could ask the servers that S3 stands before."""
    files.mkdir("bucket")
    files.pipe_file("bucket/weights", b"good")
    files.pipe_file("bucket/large", b"good" * 10_000)
    filer, master = (f"http://127.0.0.1:{server.access.ports[part]}" for part in ("filer", "master"))
    asked = [
        httpx.get(f"{filer}/buckets/bucket/"),
        httpx.get(f"{filer}/buckets/bucket/weights"),
        httpx.put(f"{filer}/buckets/bucket/weights", files={"file": b"evil"}),
        httpx.delete(f"{filer}/buckets/bucket/weights"),
        httpx.get(f"{master}/dir/assign"),
        httpx.get(f"{master}/col/delete?collection=bucket"),
    ]
    assert {answer.status_code for answer in asked} == {404}
    assert files.cat("bucket/weights") == b"good"
    for part in PARTS:
        with pytest.raises(ssl.SSLError, match="CERTIFICATE_REQUIRED"):
            speak_without_certificate(server.access.ports[f"{part}-grpc"])
    volume = f"http://127.0.0.1:{server.access.ports['volume']}/{file_id(server, '/buckets/bucket/large')}"
    asked = [httpx.get(volume), httpx.put(volume, files={"file": b"evil"}), httpx.delete(volume)]
    assert {answer.status_code for answer in asked} == {401}
    assert files.cat("bucket/large") == b"good" * 10_000
    assert {path.stat().st_mode & 0o077 for path in server.folder.glob("*.*")} == {0}


def test_the_stack_s_folder_may_have_any_name(tmp_path: Path) -> None:
    folder = tmp_path / 'a "stack" \\ 𝕊'
    folder.mkdir()
    write_security(folder)
    security = tomllib.loads((folder / "security.toml").read_text())
    assert security["grpc"]["ca"] == security["grpc"]["filer"]["cert"] == str(folder / "certificate.pem")
    assert security["grpc"]["client"]["key"] == str(folder / "key.pem")


def test_more_is_kept_than_a_few_volumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infra.servers.s3.START_S", 240.0)
    monkeypatch.setattr("infra.servers.s3.VOLUME_MIB", 1)
    server = S3Server(tmp_path / "s3", Owner("tests", tmp_path / "logs"))
    try:
        files = client(server)
        files.mkdir("bucket")
        for number in range(40):
            files.pipe_file(f"bucket/{number}", os.urandom(2**20))
    finally:
        server.stop()
