"""A file system without room: writers wait for it, say so, and leave nothing half-written."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("own_namespaces")

IN_A_SMALL_FILE_SYSTEM = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
"""A mount of its own, which needs no rights."""
MOUNT = 'mount -t tmpfs -o size=1m none "$0" && exec "$@"'
PROGRAM = """
import os, sys, time
from pathlib import Path
from types import SimpleNamespace
from infra import waiting
from infra.transport.base import StoreUnavailableError
from infra.transport.files import FileTransport
from infra.transport.files import StoredTransport

kind, folder = {"files": FileTransport, "stored": StoredTransport}[sys.argv[1]], Path(sys.argv[2])
data = {"aux": os.urandom(300_000)}
patient, impatient = (kind(str(folder / "kept") if kind is StoredTransport else folder / "kept", wait_s=wait)
    for wait in (60.0, 0.2))
filler = folder / "filler"
with filler.open("wb") as file:
    os.posix_fallocate(file.fileno(), 0, 900_000)
before = sorted(folder.rglob("*"))
try:
    impatient.put("key", data)
except StoreUnavailableError as error:
    print("gave up:", error)
assert sorted(folder.rglob("*")) == before, "something half-written is left"
# There is room once the writer waits for it, and not before.
waiting.time = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: filler.unlink(missing_ok=True))
record = patient.put("key", data)
assert patient.verify(record)
print("written")
"""


@pytest.mark.parametrize("kind", ["files", "stored"])
def test_a_writer_waits_for_room_on_a_full_file_system(tmp_path: Path, kind: str) -> None:
    command = [*IN_A_SMALL_FILE_SYSTEM, MOUNT, str(tmp_path), sys.executable, "-c", PROGRAM, kind, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    said = f"no room for 300000 bytes, the file system of {tmp_path}/kept is full: free space there"
    assert f"gave up: {said}" in ended.stdout
    assert f"waiting up to 60 s: {said}" in ended.stdout
    assert ended.stdout.endswith("written\n")


CHOICE = """
import sys
from contextlib import closing
from pathlib import Path
from infra.config import TransportConfig
from infra.run.ownership import own_run
from infra.files.run_folder import RunFolder
from infra.transport.choice import objects_folder, open_transport

run = RunFolder(Path(sys.argv[1]) / "run")
for budget_mib in (32, 8):
    config = TransportConfig(budget_mib=budget_mib)
    with own_run(run, config, print):
        for _ in range(2):  # whoever comes later finds less free memory, and the same place
            with closing(open_transport(config, run)) as transport:
                print(budget_mib, type(transport).__name__, objects_folder(config, run))
                transport.verify(transport.put("key", {"aux": bytes(2**20)}))
                transport.delete("key")
try:
    objects_folder(TransportConfig(budget_mib=32, kind="arena"), run)
except ValueError as error:
    print("refused:", error)
"""


def test_shared_memory_of_64_mib_holds_no_arena_of_32_mib_and_its_spare(tmp_path: Path) -> None:
    """What Docker gives a container by default."""
    mount = 'mount -t tmpfs -o size=64m none /dev/shm && exec "$@"'
    command = [*IN_A_SMALL_FILE_SYSTEM, mount, "sh", sys.executable, "-c", CHOICE, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    missing = (
        "64 MiB are free in /dev/shm, and 80 MiB are needed: make it larger (for a container, --shm-size), or lower "
        "transport.budget_mib"
    )
    expected = [
        f"objects are kept in {tmp_path}/run, which is slower than shared memory: {missing}",
        *[f"32 FileTransport {tmp_path}/run/objects"] * 2,
        *["8 ArenaTransport /dev/shm/draftsmith-run/objects"] * 2,
        f"refused: transport.kind=arena does not fit: {missing}, or set transport.kind=auto to use the run folder",
    ]
    assert ended.stdout.splitlines() == expected


def test_shared_memory_that_is_read_only_holds_no_arena(tmp_path: Path) -> None:
    mount = 'mount -t tmpfs -o ro none /dev/shm && exec "$@"'
    command = [*IN_A_SMALL_FILE_SYSTEM, mount, "sh", sys.executable, "-c", CHOICE, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    missing = "/dev/shm is not writable: make it so, or set $DRAFTSMITH_SHM to a tmpfs of yours"
    said = f"objects are kept in {tmp_path}/run, which is slower than shared memory: {missing}"
    assert ended.stdout.splitlines() == [
        *[said, *[f"32 FileTransport {tmp_path}/run/objects"] * 2],
        *[said, *[f"8 FileTransport {tmp_path}/run/objects"] * 2],
        f"refused: transport.kind=arena does not fit: {missing}, or set transport.kind=auto to use the run folder",
    ]


FULL_AFTERWARDS = """
import os, sys, time
from pathlib import Path
from types import SimpleNamespace
from infra import waiting
from infra.transport.arena import ArenaTransport

folder = Path(sys.argv[1])
transport = ArenaTransport(folder / "arena", 100_000)
room, filler = os.statvfs(folder), folder / "filler"
with filler.open("wb") as file:
    os.posix_fallocate(file.fileno(), 0, room.f_frsize * room.f_bavail)
waiting.time = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: filler.unlink(missing_ok=True))
for number in range(300):
    record = transport.put(f"key{number}", {"aux": bytes([number % 256]) * 90_000})
    assert transport.verify(record)
    transport.delete(record.key)
"""


def test_an_arena_whose_file_system_fills_up_later_waits_and_loses_nothing(tmp_path: Path) -> None:
    """Its bytes are its own; only the table of extents still grows."""
    mount = 'mount -t tmpfs -o size=8m none "$0" && exec "$@"'
    command = [*IN_A_SMALL_FILE_SYSTEM, mount, str(tmp_path), sys.executable, "-c", FULL_AFTERWARDS, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert ended.returncode == 0, ended.stderr
    assert f"no room for the arena's table, the file system of {tmp_path}/arena is full" in ended.stdout
