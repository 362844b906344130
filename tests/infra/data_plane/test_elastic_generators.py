"""A real run whose slow side changes: a generator comes, and goes again, and no sample notices."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial

import psutil
import pytest
import sqlalchemy as sa
import torch
from safetensors.torch import load_file

from infra.data_plane import elastic_generators
from infra.data_plane.bottleneck import Elasticity
from infra.data_plane.elastic_generators import ElasticGenerators
from infra.data_plane.start import start_generator, start_trainer
from infra.files.run_folder import RunFolder
from infra.ledger.ledger import Ledger
from infra.ledger.schema import samples
from infra.pools.base import PoolSpec
from infra.pools.local import LocalPool, LocalPools
from infra.pools.run_pools import SinglePools
from infra.processes.keep_running import KeptProcess, follow
from infra.processes.process import Owner
from infra.records.data_path import SampleProgress, TrainingResult, generators_changes

SAMPLES = 240
SMALL = [
    f"data.max_samples={SAMPLES}",
    "data.max_tokens=64",
    "training.samples_per_step=4",
    "training.log_steps=2",  # samples arrive in clumps of about two steps
    "generator.lease_samples=1",
    "transport.budget_mib=3",
]
STOPPED_S = 0.19


def processes(folder: RunFolder, *command: str) -> list[psutil.Process]:
    """Of the run, but for their supervisors."""
    found = []
    for process in psutil.process_iter():
        try:
            given = process.cmdline()
        except psutil.Error:
            continue
        if {str(folder.path), *command} <= set(given) and "--grace" not in given:
            found.append(process)
    return found


@contextmanager
def slowing(slow: Callable[[], tuple[list[psutil.Process], float, float]]) -> Iterator[None]:
    """Stops processes most of the time and lets them run for a moment in between: a slow machine."""
    ended = threading.Event()

    def stop_and_go() -> None:
        going_s = 0.0
        while not ended.wait(going_s):
            stopped, stopped_s, going_s = slow()
            for process in stopped:
                with suppress(psutil.NoSuchProcess):  # it has just ended
                    process.suspend()
            ended.wait(stopped_s)
            for process in stopped:
                with suppress(psutil.NoSuchProcess):
                    process.resume()

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def final_weights(folder: RunFolder) -> dict[str, torch.Tensor]:
    return load_file(folder.path / TrainingResult.read(folder.training).checkpoint / "draft.safetensors")


def captured_by(folder: RunFolder) -> set[str]:
    """Names of the generators whose samples were taken."""
    taken = sa.select(samples.c.owner).where(samples.c.step.is_not(None)).distinct()
    with Ledger.open(folder.ledger_url, folder.name) as ledger, ledger.read() as rows:
        return set(rows.connection.execute(taken).scalars())


@pytest.mark.slow
def test_a_generator_comes_and_goes_as_the_slow_side_changes(
    make_run, finished_run, monkeypatch: pytest.MonkeyPatch, without_twins: None
) -> None:
    undisturbed = finished_run(*SMALL)
    folder = make_run("elastic", *SMALL, "generator.max_count=2")
    monkeypatch.setattr(elastic_generators, "LOOK_S", 0.2)
    owner = Owner(folder.name, folder.logs)
    pool, said = LocalPool(owner), []

    def slow() -> tuple[list[psutil.Process], float, float]:
        numbers = [change.generators for change in generators_changes(folder.generators)]
        if len(numbers) > 1 and "generator-1" in captured_by(folder):
            # Much slower than what generators measured while they were stopped themselves, until one goes; slower to
            # the end, or a busy machine might want it back.
            return processes(folder, "models.training.trainer"), STOPPED_S * (1 if len(numbers) > 2 else 4), 0.04
        if "ready after" not in (folder.logs / "generator-0.log").read_text():
            return [], STOPPED_S, 0.01
        # While the second one loads, which may take a minute, samples must be left for it.
        return processes(folder, "models.capture.generator", "0"), STOPPED_S * len(numbers) ** 3, 0.01

    def start(own, index: int) -> KeptProcess:
        return start_generator(own, folder, index, 1, threads=1, alone=True)

    elastic = partial(ElasticGenerators, folder, elasticity=Elasticity(1, 2, patience_s=1.0), replaces=False)
    singles = SinglePools(LocalPools((), folder.path), PoolSpec("inference", 0), owner)
    with (
        closing(elastic([start_generator(pool, folder, 0, 1, 1)], start, singles)) as generators,
        closing(start_trainer(pool, folder, 1, 1)) as trainer,
        slowing(slow),
    ):
        follow(trainer, generators, said.append, said.append)
    history = generators_changes(folder.generators)
    assert [change.generators for change in history] == [1, 2, 1], said
    assert history[1].why.startswith("generator-1 is added: inference is the slow side: training could take ")
    assert history[2].why.startswith("generator-1 is removed: training is the slow side: training could take ")
    assert [line for line in said if "generator-1" in line] == [
        f"{history[1].why}; generators: 2",
        f"{history[2].why}; generators: 1",
    ]
    assert "generator 1 done: " in (folder.logs / "generator-1.log").read_text()
    assert processes(folder, "models.capture.generator") == []
    with Ledger.open(folder.ledger_url, folder.name) as ledger:
        assert ledger.progress() == SampleProgress(consumed=SAMPLES)
    assert captured_by(folder) == {"generator-0", "generator-1"}
    steps = [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()]
    assert steps == list(range(2, SAMPLES // 4 + 1, 2))
    mine, theirs = final_weights(folder), final_weights(undisturbed)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
