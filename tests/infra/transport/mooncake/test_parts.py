"""A store whose memory is in several processes: its sizes add up, and a part that dies takes only its objects along."""

import os
import subprocess
import sys
import time
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import sqlalchemy as sa
from kept_store import MIB, WAIT_S, KeptStore, get, kept_store, put

from infra.files.atomic import sha256_file
from infra.files.run_folder import RunFolder
from infra.ledger.schema import samples
from infra.records.data_path import SampleProgress, TrainingResult
from infra.transport.base import TransferError
from infra.transport.mooncake.client import MooncakeClient
from infra.transport.mooncake.environment import check_mooncake
from models.run import PreparedRun

pytestmark = pytest.mark.slow
PARTS = 3
ROOT = Path(__file__).parents[4]


@pytest.fixture
def store(public_folder: Path) -> Iterator[KeptStore]:
    with kept_store(public_folder, budget_mib=24, parts=PARTS) as opened:
        yield opened


@pytest.fixture
def client(store: KeptStore) -> MooncakeClient:
    return MooncakeClient(store.record, wait_s=WAIT_S)


def part_of(client: MooncakeClient, key: str, pieces: int) -> set[str]:
    """Where Mooncake has put an object's pieces."""
    described = client.store.batch_get_replica_desc([f"{key}#{piece}" for piece in range(pieces)])
    assert len(described) == pieces
    return {
        found.get_memory_descriptor().buffer_descriptor.transport_endpoint
        for copies in described.values()
        for found in copies
    }


def test_the_memory_is_the_sum_of_the_parts(store: KeptStore) -> None:
    with urllib.request.urlopen(f"http://{store.record.web}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    (total,) = (float(line.split()[1]) for line in lines if line.startswith("master_total_capacity_bytes "))
    assert total == PARTS * store.record.nbytes >= 1.5 * 24 * MIB
    folder = Path(store.record.folder)
    assert [path.name for path in folder.iterdir()] == ["run"], "a killed part would leave its memory behind"


def test_an_object_is_whole_on_the_part_of_its_reader(store: KeptStore, client: MooncakeClient) -> None:
    data = os.urandom(9 * MIB)
    places = []
    for part in range(PARTS):
        put(client, f"run/0/{part}/1", data, part)
        places.append(part_of(client, f"run/0/{part}/1", 3))
    assert all(len(place) == 1 for place in places)
    assert len(set.union(*places)) == PARTS
    for index in range(20):
        put(client, f"run/1/{index}/1", b"x" * 5 * MIB)
        assert len(part_of(client, f"run/1/{index}/1", 2)) == 1
    for part in range(PARTS):
        assert get(client, f"run/0/{part}/1", len(data)) == data


def test_a_full_part_leaves_its_objects_to_the_others(store: KeptStore, client: MooncakeClient) -> None:
    size = 20 * MIB
    written = store.record.nbytes // size + 2
    for index in range(written):
        put(client, f"run/0/{index}/1", bytes([index]) * size, 1)
    for index in range(written):
        assert get(client, f"run/0/{index}/1", size) == bytes([index]) * size
    places = [part_of(client, f"run/0/{index}/1", 5) for index in range(written)]
    assert places[0] < set.union(*places)


def test_a_killed_part_loses_only_its_objects_and_comes_back(store: KeptStore, client: MooncakeClient) -> None:
    data = os.urandom(9 * MIB)
    for part in range(PARTS):
        put(client, f"run/0/{part}/1", data, part)
    name = Path(store.record.names) / "1"
    before = name.read_text()
    store.kill(store.parts[1])
    with pytest.raises(TransferError, match="run/0/1/1 cannot be read"):
        get(client, "run/0/1/1", len(data))
    put(client, "run/0/1/2", data, 1)
    for key in ("run/0/0/1", "run/0/1/2", "run/0/2/1"):
        assert get(client, key, len(data)) == data
    deadline = time.monotonic() + WAIT_S
    while name.read_text() == before:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    put(client, "run/0/1/3", data, 1)
    others = part_of(client, "run/0/0/1", 3) | part_of(client, "run/0/2/1", 3)
    assert not part_of(client, "run/0/1/3", 3) & others


SMALL = ("data.max_samples=200", "data.max_tokens=96", "training.samples_per_step=4", "training.log_steps=1")


def test_a_run_captures_again_what_a_killed_part_held_and_nothing_else(
    make_run: Callable[..., RunFolder], finished_run: Callable[..., RunFolder]
) -> None:
    """The trainer waits; it does not start again, and its weights are those of a run that nothing disturbed."""
    try:
        check_mooncake()
    except ValueError as error:
        pytest.skip(str(error))
    undisturbed = finished_run(*SMALL)
    folder = make_run("run", *SMALL, "transport.kind=mooncake", "ledger.lease_seconds=3600")
    driver = [sys.executable, str(ROOT / "benchmarks" / "driver.py"), str(folder.path), "--parts", "2"]
    with subprocess.Popen(driver, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            run = PreparedRun.open(folder.path)
            ledger = run.open_ledger()
            # Generators are ahead of the trainer as soon as it is busy; both parts hold something then.
            while (now := ledger.progress()).consumed + now.taken < 8 or now.ready < 12:
                assert process.poll() is None, process.communicate()[0]
                time.sleep(0.01)
            kill_part(process.pid, 1)
            output, _ = process.communicate(timeout=600)
        finally:
            process.kill()
    assert process.returncode == 0, output
    assert "trainer" not in "".join(line for line in output.splitlines() if "restart" in line), output
    assert ledger.progress() == SampleProgress(consumed=run.samples.train_samples)
    query = sa.select(samples.c.epoch, samples.c.ordinal).where(samples.c.attempt > 1)
    with ledger.read() as rows:
        again = [f"{folder.name}/{row.epoch}/{row.ordinal}/1" for row in rows.all(query)]
    print(output, len(again), "captured again")
    assert again
    assert [key for key in again if zlib.crc32(key.encode()) % 2 == 0] == []
    assert weights(folder) == weights(undisturbed)


def kill_part(driver: int, part: int) -> None:
    """`kill -9` of the process that holds a part, and not of its supervisor's parent."""
    for process in psutil.Process(driver).children(recursive=True):
        command = process.cmdline()
        if (
            "infra.transport.mooncake.store" in command
            and command[-2:] == ["--part", str(part)]
            and "--" not in command
        ):
            process.kill()


def weights(folder: RunFolder) -> str:
    result: TrainingResult = TrainingResult.read(folder.training)
    return sha256_file(folder.path / result.checkpoint / "draft.safetensors")
