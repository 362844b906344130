"""Which transport a run uses, and where it keeps its objects. Every process of the run comes to the same answer."""

import os
from pathlib import Path

from infra.config import TransportConfig
from infra.records import StoreRecord
from infra.run_folder import RunFolder
from infra.settings import shared_memory_folder
from infra.transport.arena import ArenaTransport
from infra.transport.base import Transport
from infra.transport.files import FileTransport
from infra.transport.mooncake import MooncakeTransport
from infra.transport.stored import StoredTransport

BEYOND_BUDGET = 32 * 2**20
"""Room for what generators write, read and delete before they lease anything: their canaries."""


def run_memory_folder(run: RunFolder) -> Path:
    """The run's folder in shared memory: `/dev/shm/draftsmith-<run>`; whoever owns the run removes it."""
    return shared_memory_folder() / f"draftsmith-{run.name}"


def objects_folder(config: TransportConfig, run: RunFolder) -> Path:
    """Shared memory, or the run folder where shared memory is smaller than twice the budget."""
    if config.folder is not None and config.kind != "stored":
        return Path(config.folder) / f"draftsmith-{run.name}" / "objects"
    return (run_memory_folder(run) if _fits(config) else run.path) / "objects"


def _fits(config: TransportConfig) -> bool:
    memory = shared_memory_folder()
    if not memory.is_dir():
        return False
    room = os.statvfs(memory)
    return room.f_frsize * room.f_blocks >= 2 * config.budget_mib * 2**20


def open_transport(config: TransportConfig, run: RunFolder) -> Transport:
    """The transport of this run, for this process."""
    if config.kind == "stored":
        assert config.folder is not None, "checked with the recipe"
        return StoredTransport(config.folder)
    if config.kind == "mooncake":
        return MooncakeTransport(StoreRecord.read(run.store))
    folder = objects_folder(config, run)
    if config.kind == "arena" or (config.kind == "auto" and config.folder is None and _fits(config)):
        return ArenaTransport(folder, config.budget_mib * 2**20 + BEYOND_BUDGET)
    return FileTransport(folder)
