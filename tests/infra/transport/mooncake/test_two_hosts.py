"""Two machines, made of network namespaces: the generator on one, ledger, store and trainer on the other."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

import pytest
from two_hosts import TRAINER, Hosts, on, possible, two_hosts

from infra.files.atomic import sha256_file
from infra.files.run_folder import RunFolder
from infra.records.data_path import StoreRecord, TrainingResult
from infra.transport.mooncake.environment import check_mooncake

ROOT = Path(__file__).parents[4]
DRIVER = str(ROOT / "benchmarks" / "driver.py")
SMALL = (
    "data.max_samples=120",
    "data.max_tokens=96",
    "training.samples_per_step=4",
    "training.log_steps=1",
    "training.warmup_steps=4",
)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if not possible():
        pytest.skip("making network namespaces needs root and iproute2")
    try:
        check_mooncake()
    except ValueError as error:
        pytest.skip(str(error))
    with two_hosts() as made:
        yield made


@contextmanager
def started(host: str, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    command = on(host, [sys.executable, *arguments])
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=30)


def wait_until_ready(process: "subprocess.Popen[str]") -> None:
    assert process.stdout is not None
    print(*takewhile(lambda line: line != "ready\n", process.stdout))


@pytest.mark.slow
def test_the_same_weights_as_on_one_host(
    hosts: Hosts,
    public_folder: Path,
    make_run: Callable[..., RunFolder],
    run_to_the_end: Callable[[RunFolder], None],
) -> None:
    alone = make_run("alone", *SMALL)
    run_to_the_end(alone)
    with started(hosts.trainer, DRIVER, "--postgres", str(public_folder / "postgres"), TRAINER) as postgres:
        wait_until_ready(postgres)
        url = (public_folder / "url").read_text()
        places = ("transport.kind=mooncake", f"transport.address={TRAINER}", f"ledger.url={url}")
        folder = make_run("apart", *SMALL, *places)
        with started(hosts.trainer, DRIVER, str(folder.path), "--side", "trainer") as trainer:
            wait_until_ready(trainer)
            with started(hosts.generator, "-m", "models.capture.generator", str(folder.path)) as generator:
                for process in (trainer, generator):
                    output, _ = process.communicate(timeout=600)
                    assert process.returncode == 0, output
    assert weights(folder) == weights(alone)
    assert losses(folder) == losses(alone)
    assert StoreRecord.read(folder.store).protocol == "tcp"


def weights(folder: RunFolder) -> str:
    result: TrainingResult = TrainingResult.read(folder.training)
    return sha256_file(folder.path / result.checkpoint / "draft.safetensors")


def losses(folder: RunFolder) -> list[float]:
    return [json.loads(line)["loss"] for line in folder.metrics.read_text().splitlines()]
