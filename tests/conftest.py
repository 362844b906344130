"""Fixtures for all tests: the tiny target, trained once and kept in the cache, and runs prepared on it."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

from infra.files import write_atomically
from infra.records import TargetRecord
from infra.run_folder import RunFolder
from infra.transport.choice import run_memory_folder
from models.config import load_recipe

RECIPES = Path(__file__).parent.parent / "recipes"
TINY = RECIPES / "tiny.yaml"

MakeRun = Callable[..., RunFolder]


@pytest.fixture(scope="session")
def tiny_target() -> TargetRecord:
    """The tiny target of recipes/tiny.yaml (about a minute the first time on a machine)."""
    from models.targets.prepare import prepare_target

    return prepare_target(load_recipe(TINY).target)


@pytest.fixture
def make_run(tmp_path: Path, tiny_target: TargetRecord) -> Iterator[MakeRun]:
    """Makes run folders of the tiny recipe: `make_run("name", "training.max_steps=3", ...)`."""
    import shutil

    from models.data.prepare import prepare_samples

    made: list[RunFolder] = []

    def make(name: str, *overrides: str) -> RunFolder:
        config = load_recipe(TINY, list(overrides))
        folder = RunFolder(tmp_path / f"{name}-{os.getpid()}")
        write_atomically(folder.config, config)
        write_atomically(folder.target, tiny_target)
        write_atomically(folder.samples, prepare_samples(config.data, tiny_target, config.target.add_bos))
        made.append(folder)
        return folder

    yield make
    for folder in made:
        shutil.rmtree(run_memory_folder(folder), ignore_errors=True)
