"""Opens a run: its folder, its locks, its place in shared memory. Used inside the flow's process."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from prefect import get_run_logger

from infra.files import write_atomically
from infra.ledger.ledger import Ledger
from infra.locks import Lock, LockHeldError, hold, own_folder, sweep
from infra.processes import Owner
from infra.run_folder import RunFolder
from infra.settings import runs_folder, shared_memory_folder, tracking_uri
from infra.transport.choice import objects_folder
from models.config import RunConfig, without_placement

LAST_PROCESSES_S = 60.0


@dataclass(frozen=True)
class OpenRun:
    """A run that this process owns: what every task of it is given."""

    config: RunConfig
    folder: RunFolder
    owner: Owner

    @property
    def tracking_uri(self) -> str:
        return self.config.tracking.uri or tracking_uri()

    @property
    def tracking_record(self) -> Path:
        """Which MLflow run is this one's."""
        return self.folder.path / "tracking.json"

    def open_ledger(self) -> Ledger:
        return Ledger.open(self.config.ledger.url or self.folder.ledger_url, self.folder.name)

    @property
    def draft_name(self) -> str:
        """Name in the model registry."""
        return self.config.tracking.registered_model or f"draft-{self.config.name}"


@contextmanager
def open_run(config: RunConfig, name: str | None) -> Iterator[OpenRun]:
    """Own the run `name` (a new one where None): nobody else runs it, and nothing of it outlives this process.

    Raises ValueError where another process owns it, or where the folder belongs to another configuration.
    """
    folder = RunFolder(runs_folder() / name if name else _new_folder(config.name))
    with ExitStack() as stack:
        try:
            stack.enter_context(hold(folder.path / "run.lock"))
            # The supervisors of a killed owner hold this one until they have stopped its processes.
            processes = stack.enter_context(hold(folder.path / "processes.lock", wait_s=LAST_PROCESSES_S))
            locks, folders = [processes], []
            for gone in sweep(shared_memory_folder()):
                get_run_logger().info("removed %s, whose owner is gone", gone)
            objects = objects_folder(config.transport, folder).parent
            if objects != folder.path:
                locks.append(stack.enter_context(own_folder(objects)))
                folders.append(objects)
        except LockHeldError as error:
            raise ValueError(
                f"run {folder.name} is owned by another process ({error} is locked): wait until it ends, or stop it"
            ) from error
        _remember(config, folder)
        get_run_logger().info("run folder: %s", folder.path)
        yield OpenRun(config, folder, _owner(folder, locks, folders))


def _owner(folder: RunFolder, locks: list[Lock], folders: list[Path]) -> Owner:
    return Owner(folder.name, folder.logs, tuple(folders), tuple(lock.descriptor for lock in locks))


def _new_folder(recipe: str) -> Path:
    stem = f"{recipe}-{time.strftime('%Y%m%d-%H%M%S')}"
    for number in count(1):
        folder = runs_folder() / (stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("unreachable")


def _remember(config: RunConfig, folder: RunFolder) -> None:
    if folder.config.exists():
        before = RunConfig.model_validate_json(folder.config.read_text())
        if without_placement(before) != without_placement(config):
            raise ValueError(f"{folder.path} belongs to another configuration: resume it as it is, or start a new run")
    write_atomically(folder.config, config)
