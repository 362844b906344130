"""A run folder with target and samples, for benchmarks that start the data plane themselves."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.files import write_atomically
from infra.run_folder import RunFolder
from infra.transport.choice import run_memory_folder
from models.config import load_recipe
from models.data.prepare import prepare_samples, recipe_data
from models.run import Run
from models.targets.prepare import prepare_target


@contextmanager
def prepared_run(path: Path, recipe: Path, overrides: list[str]) -> Iterator[Run]:
    """The run, whose place in shared memory is removed at the end."""
    folder, config = RunFolder(path), load_recipe(recipe, overrides)
    target = prepare_target(config.target)
    write_atomically(folder.config, config)
    write_atomically(folder.target, target)
    write_atomically(folder.samples, prepare_samples(recipe_data(config), target, config.target.add_bos))
    try:
        yield Run.open(path)
    finally:
        shutil.rmtree(run_memory_folder(folder), ignore_errors=True)
