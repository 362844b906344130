"""Two machines, made of network namespaces: the generator on one, ledger, store and trainer on the other."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

import pytest

from infra.files import sha256_file
from infra.mooncake.environment import check_mooncake
from infra.records import StoreRecord, TrainingResult
from infra.run_folder import RunFolder

HOST = Path(__file__).with_name("trainer_host.py")
ROOT = Path(__file__).parents[3]
TRAINER, GENERATOR = "10.77.0.1", "10.77.0.2"
SMALL = (
    "data.max_samples=120",
    "data.max_tokens=96",
    "training.samples_per_step=4",
    "training.log_steps=1",
    "training.warmup_steps=4",
)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """Names of two namespaces joined by a cable; no other network is in them."""
    if os.getuid() != 0 or shutil.which("ip") is None:
        pytest.skip("making network namespaces needs root and iproute2")
    try:
        check_mooncake()
    except ValueError as error:
        pytest.skip(str(error))
    names = [f"draftsmith-{os.getpid()}-{side}" for side in "ab"]
    cables = [f"ds{os.getpid()}{side}" for side in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        for name, cable, address in zip(names, cables, (TRAINER, GENERATOR), strict=True):
            ip("link", "set", cable, "netns", name)
            ip("-n", name, "address", "add", f"{address}/24", "dev", cable)
            for device in (cable, "lo"):
                ip("-n", name, "link", "set", device, "up")
        yield names[0], names[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], check=False)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=30)


@pytest.mark.slow
def test_the_same_weights_as_on_one_host(
    hosts: tuple[str, str],
    public_folder: Path,
    make_run: Callable[..., RunFolder],
    run_to_the_end: Callable[[RunFolder], None],
) -> None:
    alone = make_run("alone", *SMALL)
    run_to_the_end(alone)
    folder = make_run("apart", *SMALL, "transport.kind=mooncake", f"transport.address={TRAINER}")
    with started(hosts[0], str(HOST), str(folder.path), TRAINER, str(public_folder / "postgres")) as trainer:
        assert trainer.stdout is not None
        print(*takewhile(lambda line: "everything is there" not in line, trainer.stdout))
        with started(hosts[1], "-m", "models.capture.generator", str(folder.path)) as generator:
            for process in (trainer, generator):
                output, _ = process.communicate(timeout=200)
                assert process.returncode == 0, output
    assert weights(folder) == weights(alone)
    assert losses(folder) == losses(alone)
    store = StoreRecord.read(folder.store)
    assert store.master.startswith(TRAINER)
    assert store.protocol == "tcp"


@contextmanager
def started(host: str, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    command = ["ip", "netns", "exec", host, sys.executable, *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=30)


def weights(folder: RunFolder) -> str:
    result: TrainingResult = TrainingResult.read(folder.training)
    return sha256_file(folder.path / result.checkpoint / "draft.safetensors")


def losses(folder: RunFolder) -> list[float]:
    return [json.loads(line)["loss"] for line in folder.metrics.read_text().splitlines()]
