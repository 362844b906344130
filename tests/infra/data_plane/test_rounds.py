"""Capture and training in turns: the same losses as streamed, exactly once, whole after kills. Real processes."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from itertools import cycle
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from infra.data_plane.rounds import follow_capture
from infra.data_plane.start import start_generator, start_trainer
from infra.data_plane.watch import StallError
from infra.files.atomic import write_atomically
from infra.files.run_folder import RunFolder
from infra.ledger.ledger import Ledger
from infra.pools.local import LocalPool
from infra.processes.keep_running import Generators, follow
from infra.processes.process import Owner
from infra.records.data_path import SampleProgress, TrainingResult
from infra.records.sharing import Sharing
from infra.run.ownership import hold_run
from models.run import PreparedRun

SMALL = ["data.max_samples=36", "data.max_tokens=64", "training.samples_per_step=4", "training.log_steps=1"]
WAIT_S = 400.0
ROUND_BYTES = 3 * 2**20
"""About half of the 36 samples."""


def nothing() -> None:
    """No watch."""


def in_turns(folder: RunFolder) -> list[str]:
    """Train a run to its end, as the flow does; what was said."""
    said: list[str] = []
    with hold_run(folder, said.append) as lock, Ledger.open(folder.ledger_url, folder.name) as ledger:
        pool = LocalPool(Owner(folder.name, folder.logs, locks=(lock.descriptor,)))
        generator = partial(start_generator, pool, folder, 0, 1, 1)
        while True:
            with closing(start_trainer(pool, folder, 1, 1)) as trainer:
                follow(trainer, Generators(), said.append, said.append)
            if ledger.finished():
                return said
            follow_capture(ledger, [generator], said.append, said.append, nothing)
            sizes = {file.name: file.stat().st_size for file in (folder.path / "objects").iterdir()}
            assert sum(sizes.values()) <= ROUND_BYTES, sizes


def alternating(folder: RunFolder, budget_bytes: int = ROUND_BYTES) -> RunFolder:
    write_atomically(folder.sharing, Sharing(mode="alternate", why="a test", budget_bytes=budget_bytes, on_disk=True))
    return folder


def losses(folder: RunFolder) -> list[float]:
    return [json.loads(line)["loss"] for line in folder.metrics.read_text().splitlines()]


def weights(folder: RunFolder) -> dict[str, torch.Tensor]:
    result = TrainingResult.read(folder.training)
    return load_file(folder.path / result.checkpoint / "draft.safetensors")


def check_whole(folder: RunFolder, streamed: RunFolder, samples: int) -> None:
    assert PreparedRun.open(folder.path).open_ledger().progress() == SampleProgress(consumed=samples)
    assert losses(folder) == losses(streamed)
    mine, theirs = weights(folder), weights(streamed)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert not list((folder.path / "objects").iterdir())


def test_a_run_in_which_no_side_can_go_on_is_ended(make_run) -> None:
    folder = alternating(make_run("stuck", *SMALL))
    with PreparedRun.open(folder.path).open_ledger() as ledger, pytest.raises(StallError, match="neither generators"):
        follow_capture(ledger, [], print, print, nothing)


FLOW = "import sys; sys.path[:0] = sys.argv[2:]; import test_rounds as t; from pathlib import Path; "
FLOW += "t.in_turns(t.RunFolder(Path(sys.argv[1])))"


def trained(folder: RunFolder) -> int:
    return len(losses(folder)) if folder.metrics.is_file() else 0


MOMENTS: dict[str, Callable[[RunFolder, Ledger], bool]] = {
    "the trainer takes the run over": lambda _, ledger: ledger.progress().total > 0,
    "the engine loads": lambda folder, _: (folder.logs / "generator-0.log").is_file(),
    "the first round is captured": lambda _, ledger: ledger.progress().ready > 4,
    "the first round is trained": lambda folder, _: trained(folder) >= 3,
    "the second round is captured": lambda folder, ledger: trained(folder) >= 4 and ledger.progress().leased > 0,
    "the second epoch is captured": lambda folder, ledger: ledger.progress(1).ready > 4,
    "the second epoch is trained": lambda folder, _: trained(folder) >= 12,
}
EACH_SIDE = ("the first round is captured", "the second epoch is captured")
"""A generator is killed, then the flow; flows/test_one_gpu.py kills one while a round is trained."""


@pytest.mark.parametrize(
    ("victims", "moments"),
    [
        pytest.param("process, flow", EACH_SIDE, marks=pytest.mark.slow),
        *[pytest.param(one, MOMENTS, marks=pytest.mark.long) for one in ("process, flow", "process", "flow")],
    ],
)
def test_turns_are_whole_after_kills(make_run, finished_run, victims: str, moments, kill_tree) -> None:
    """SIGKILL in every phase of two epochs: of generator or trainer, which is restarted, or of the flow and all."""
    settings = [*SMALL, "training.epochs=2", "training.checkpoint_steps=2"]
    folder = alternating(make_run("killed", *settings))
    command = [sys.executable, "-c", FLOW, str(folder.path), str(Path(__file__).parent), *sys.path]
    flow, victim = subprocess.Popen(command), cycle(victims.split(", "))
    with PreparedRun.open(folder.path).open_ledger() as ledger:
        for name in moments:
            is_now, deadline = MOMENTS[name], time.monotonic() + WAIT_S
            while not is_now(folder, ledger):
                assert flow.poll() is None, f"ended before {name}"
                assert time.monotonic() < deadline, f"never came to where {name}"
                time.sleep(0.02)
            if next(victim) == "flow":
                kill_tree(flow.pid)
                flow.wait(60)
                flow = subprocess.Popen(command)
            else:
                kill_commands(flow.pid, "models.capture.generator", "models.training.trainer")
    assert flow.wait(WAIT_S) == 0
    check_whole(folder, finished_run(*settings), 72)
    result = TrainingResult.read(folder.training)
    assert (result.steps, result.tokens) == (18, 2 * PreparedRun.open(folder.path).samples.train_tokens)


def kill_commands(flow: int, *names: str) -> None:
    for process in psutil.Process(flow).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if set(names) & set(process.cmdline()):
                process.kill()
