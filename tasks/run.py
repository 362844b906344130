"""Opens a run: its folder, its locks, its place in shared memory."""

import os
import platform
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.runtime import flow_run as this_flow_run

from infra.files.atomic import write_atomically
from infra.files.folders import make_folder, private_mode
from infra.files.run_folder import RunFolder, no_run
from infra.ledger.ledger import Ledger
from infra.processes.process import Owner
from infra.redaction import redacted
from infra.refusal import Refusal
from infra.run.device_time import end_leases
from infra.run.ownership import own_run
from infra.settings import prefect_is_private, runs_folder, tracking_uri
from models.config.recipe import RunConfig, read_config, without_placement

FLOW_RUN = "flow_run"
"""File in the run folder: ids of the flow runs that ran it, one a line, the last one last."""
HOST_LABEL, RUNS_LABEL = "draftsmith.host", "draftsmith.runs"
"""Labels of a flow run: where it keeps its run."""


class RunsPlace(NamedTuple):
    """A folder of runs, and the machine that sees it under this path."""

    host: str
    runs: str

    def __str__(self) -> str:
        return f"{self.runs} on {self.host}"

    @classmethod
    def here(cls) -> "RunsPlace":
        """Where this process keeps runs."""
        return cls(platform.node(), str(runs_folder()))

    @classmethod
    def of(cls, labels: Mapping[str, Any]) -> "RunsPlace | None":
        """Where a flow run with these labels keeps its run; None: it has opened none."""
        return cls(str(labels[HOST_LABEL]), str(labels[RUNS_LABEL])) if RUNS_LABEL in labels else None


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
        return self.folder.tracking

    def open_ledger(self) -> Ledger:
        return Ledger.open(self.config.ledger.url or self.folder.ledger_url, self.folder.name)

    @property
    def draft_name(self) -> str:
        """Name in the model registry."""
        return self.config.draft_name


@contextmanager
def open_run(config: RunConfig, name: str | None, create: bool = False) -> Iterator[OpenRun]:
    """Own the run `name` (a new one where None): nobody else runs it, and nothing of it outlives this process.

    `create`: whether a run of this name is made where there is none.

    Raises Refusal where there is no run of this name, where another process owns it, or where the folder belongs to
    another configuration.
    """
    _label_flow_run()
    folder = run_named(name) if name else _folder_of_this_flow_run(config)
    if name and not create and not os.path.isfile(folder.config):  # pathlib's raises for a name that no file can have
        raise no_run(name, runs_folder())
    # Prefect's Suspend acts at the end of a step: until then Resume starts a second process beside the first.
    wait_s = config.pools.wait_hours * 3600 if this_flow_run.get_id() in _flow_runs(folder)[-1:] else 0.0
    with own_run(folder, config.transport, get_run_logger().info, wait_s) as owner:
        _remember(config, folder)
        folder.failure.unlink(missing_ok=True)
        end_leases(folder)
        get_run_logger().info("run folder: %s", folder.path)
        with ExitStack() as stack:
            stack.push(partial(_note_failure, folder))
            yield OpenRun(config, folder, owner)


def _note_failure(folder: RunFolder, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
    """Keep an error for `draftsmith status`; an interruption is none."""
    if kind is not None and issubclass(kind, Exception):
        with suppress(OSError):  # a disk that is full is the error itself, which must not be hidden by this one
            write_atomically(folder.failure, f"{redacted(str(error).strip() or kind.__name__)}\n")


def _label_flow_run() -> None:
    """Tell Prefect where this flow run keeps its run. `recover` may look into another folder, and must not take a run
    for dead because it does not see it."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None or prefect_is_private():
        return
    place = RunsPlace.here()
    with get_client(sync_client=True) as client:
        client.update_flow_run_labels(UUID(str(context.flow_run.id)), {HOST_LABEL: place.host, RUNS_LABEL: place.runs})


def _folder_of_this_flow_run(config: RunConfig) -> RunFolder:
    """A new folder, or the one this flow run made when it ran before: "Retry" in Prefect's UI resumes."""
    flow_run = this_flow_run.get_id()
    assert flow_run, "a run is opened inside a flow run"
    if before := folder_of_flow_run(flow_run, None):
        return before
    return RunFolder(_new_folder(config, flow_run))


def run_named(name: str) -> RunFolder:
    """A run by its name, or by the path of a folder. Raises Refusal for a name that leads elsewhere."""
    if not name.strip("./") or ".." in Path(name).parts:
        raise Refusal(f"run {name!r} is not the name of a run: `draftsmith status` shows those of {runs_folder()}")
    return RunFolder(runs_folder() / name)


def folder_of_flow_run(flow_run: str, name: str | None) -> RunFolder | None:
    """The folder of a flow run's run, given by name or created; None if it created none."""
    if name:
        folder = run_named(name)
        return folder if folder.path.is_dir() else None
    for note in runs_folder().glob(f"[!.]*/{FLOW_RUN}"):
        with suppress(PermissionError):  # another user's
            if flow_run in _flow_runs(folder := RunFolder(note.parent)):
                return folder
    return None


def _flow_runs(folder: RunFolder) -> list[str]:
    """Ids of the flow runs that ran the run, the last one last."""
    try:
        return (folder.path / FLOW_RUN).read_text().split()
    except FileNotFoundError:  # it is new, or removed meanwhile
        return []


def _new_folder(config: RunConfig, flow_run: str) -> Path:
    """A new run's folder, which appears with its configuration: whenever the run is interrupted, it can be resumed.

    The name must be unique beyond this folder of runs, because ledgers, stores and shared memory may be shared with
    runs elsewhere, and know a run by its name alone.
    """
    name = f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    runs = runs_folder()
    aside = runs / f".new-{name}"
    make_folder(runs)
    # What users asked is for nobody else to read.
    aside.mkdir(private_mode(runs) if config.generator.live else 0o777)
    write_atomically(RunFolder(aside).config, config)
    write_atomically(aside / FLOW_RUN, flow_run)
    return aside.rename(runs / name)


def _remember(config: RunConfig, folder: RunFolder) -> None:
    if folder.config.exists():
        before = read_config(folder.config)
        if without_placement(before) != without_placement(config):
            raise Refusal(f"{folder.path} belongs to another configuration: resume it as it is, or start a new run")
    write_atomically(folder.config, config)
    flow_run, earlier = this_flow_run.get_id(), _flow_runs(folder)
    if flow_run and flow_run not in earlier[-1:]:
        write_atomically(folder.path / FLOW_RUN, "\n".join([*(one for one in earlier if one != flow_run), flow_run]))
