"""Ranks on two machines train what one does. Real processes, gloo; network namespaces where they may be made."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from two_hosts import TRAINER, on, possible, two_hosts

from infra.data_plane.meeting import open_meeting
from infra.data_plane.start import start_generator, start_trainer
from infra.files.atomic import sha256_file
from infra.files.run_folder import RunFolder
from infra.pools.local import LocalPool
from infra.processes.keep_running import Generators, follow
from infra.processes.process import Owner
from infra.records.data_path import TrainingResult

END_S = 600.0
SMALL = (
    "data.max_samples=43",
    "data.max_tokens=64",
    "training.samples_per_step=6",
    "training.micro_batches=2",
    "training.log_steps=1",
    "training.warmup_steps=4",
    "training.checkpoint_steps=1",
    "training.ranks=2",
)


def outcome(folder: RunFolder) -> tuple[str, list[float]]:
    """The hash of the final weights, and every loss."""
    result: TrainingResult = TrainingResult.read(folder.training)
    losses = [json.loads(line)["loss"] for line in folder.metrics.read_text().splitlines()]
    return sha256_file(folder.path / result.checkpoint / "draft.safetensors"), losses


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, ...], tuple[str, list[float]]]:
    """What two ranks on one machine came to, by the recipe's changes."""
    return {}


@pytest.fixture
def undisturbed(
    make_run: Callable[..., RunFolder],
    start: Callable[..., Any],
    alone: dict[tuple[str, ...], tuple[str, list[float]]],
) -> Callable[..., tuple[str, list[float]]]:
    """What two ranks on one machine come to, trained once."""

    def train(*overrides: str) -> tuple[str, list[float]]:
        if overrides in alone:
            return alone[overrides]
        folder = make_run("alone", *SMALL, *overrides)
        processes = [start("models.capture.generator", folder), start("models.training.launch", folder, ranks=2)]
        for process in processes:
            output, _ = process.communicate(timeout=END_S)
            assert process.returncode == 0, output
        return alone.setdefault(overrides, outcome(folder))

    return train


@pytest.mark.slow
@pytest.mark.parametrize("sharded", ["false", pytest.param("true", marks=pytest.mark.long)])
def test_two_hosts_train_what_one_does(
    make_run: Callable[..., RunFolder],
    start: Callable[..., Any],
    undisturbed: Callable[..., tuple[str, list[float]]],
    sharded: str,
) -> None:
    """The ranks have no network in common but the one that joins the hosts."""
    if not possible():
        pytest.skip("making network namespaces needs root and iproute2")
    expected = undisturbed(f"training.sharded={sharded}")
    folder = make_run("apart", *SMALL, f"training.sharded={sharded}")
    generator = start("models.capture.generator", folder)
    meeting = open_meeting(folder, "trainer")
    with two_hosts() as hosts, ExitStack() as stack:
        processes = [generator]
        for index, host in enumerate((hosts.trainer, hosts.generator)):
            place = ["--machine", str(index), "2", str(meeting), TRAINER]
            command = [sys.executable, "-m", "models.training.launch", str(folder.path), "--ranks", "1", *place]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            processes.append(subprocess.Popen(on(host, command), **pipes))  # type: ignore[call-overload]
            stack.callback(processes[-1].kill)
        for process in processes:
            output, _ = process.communicate(timeout=END_S)
            assert process.returncode == 0, output
    assert outcome(folder) == expected


@pytest.mark.slow
def test_a_machine_that_dies_has_the_trainer_go_on_from_its_checkpoint(
    make_run: Callable[..., RunFolder],
    undisturbed: Callable[..., tuple[str, list[float]]],
    hold_back: Callable[..., Any],
) -> None:
    expected, folder = undisturbed("training.sharded=false"), make_run("apart", *SMALL, "ledger.lease_seconds=3600")
    pool = LocalPool(Owner("machines", folder.logs))
    printed: list[str] = []
    events: list[str] = []

    def lose_the_second_machine() -> None:
        if not events and folder.checkpoint(3, 1).exists():
            for process in psutil.process_iter(["cmdline"]):
                place = ["--machine", "1", "2"]
                command = process.info["cmdline"] or []
                if str(folder.path) in command and any(command[i : i + 3] == place for i in range(len(command))):
                    with suppress(psutil.NoSuchProcess):  # it has died with its supervisor
                        for one in (*process.children(recursive=True), process):
                            one.send_signal(signal.SIGKILL)
            events.append("lost")
            release()

    with (
        hold_back(folder, range(30, 43)) as (_, release),
        closing(start_generator(pool, folder, 0, 1, threads=1)) as generator,
        closing(start_trainer(pool, folder, 2, threads=1, machines=2)) as trainer,
    ):
        follow(trainer, Generators([generator]), printed.append, events.append, [lose_the_second_machine])
    assert events[0] == "lost"
    assert len(events) == 2, events
    assert "restart 1 of 5" in events[1]
    assert outcome(folder) == expected
    assert list(folder.checkpoints.glob("step-*-2")), "the second trainer wrote checkpoints"


@pytest.mark.slow
def test_a_machine_that_does_not_see_the_run_folder_ends_the_training(
    make_run: Callable[..., RunFolder], tmp_path: Path
) -> None:
    """At once and by name: starting it again would not mount a file system."""
    folder = make_run("apart", *SMALL)
    meeting = open_meeting(folder, "trainer")
    elsewhere = tmp_path / "elsewhere" / meeting.name
    place = ["--machine", "1", "2", str(elsewhere), "127.0.0.1"]
    command = [sys.executable, "-m", "models.training.launch", str(folder.path), "--ranks", "1", *place]
    done = subprocess.run(command, capture_output=True, text=True, timeout=END_S, check=False, env=dict(os.environ))
    assert done.returncode == 2
    assert f"does not see {elsewhere}" in done.stderr
    assert "set DRAFTSMITH_RUNS" in done.stderr
