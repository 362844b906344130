"""Chooses a run's transport and the folder of its objects, identically in every process, and sweeps it."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from infra.config import TransportConfig
from infra.files.folders import existing
from infra.files.run_folder import RunFolder
from infra.quantities import byte_size
from infra.records.data_path import StoreRecord
from infra.records.sharing import read_sharing
from infra.refusal import Refusal
from infra.settings import shared_memory_folder
from infra.transport.arena import ArenaTransport
from infra.transport.base import CANARY, Transport
from infra.transport.budget import budget_of, memory_budget
from infra.transport.files import FileTransport, StoredTransport
from infra.transport.mooncake.environment import store_bytes
from infra.transport.mooncake.transport import MooncakeTransport

IN_MEMORY = ("arena", "mooncake")
IN_FOLDERS = ("auto", "arena", "files")
BEYOND_BUDGET = 32 * 2**20
"""Room for what generators write, read and delete before they lease anything: their canaries."""
SPARE = 16 * 2**20
"""Left free in shared memory: the arena's table of extents grows, and other programs need a little too."""


def run_memory_folder(run: RunFolder) -> Path:
    """The run's folder in shared memory, `/dev/shm/draftsmith-<run>`; the run's owner removes it."""
    return shared_memory_folder() / f"draftsmith-{run.name}"


def objects_folder(config: TransportConfig, run: RunFolder) -> Path:
    """Where the run's objects lie: in shared memory, or in the run folder where too little of it is free.

    What is free changes as soon as the first process of the run takes its part, so it is decided once: a run whose
    folder exists keeps it. Raises Refusal where kind=arena leaves no choice and nothing fits.
    """
    own = config.folder is not None and config.kind != "stored"
    if not own and run.sharing.is_file() and read_sharing(run).on_disk:
        return run.path / "objects"
    place = Path(config.folder or "") / f"draftsmith-{run.name}" if own else run_memory_folder(run)
    # Of a folder below one that this user may not enter, Path.is_dir raises PermissionError.
    if not os.path.isdir(place) and (problem := shortage(config, budget_of(config, run))):
        if config.kind == "arena":
            raise Refusal(f"transport.kind=arena does not fit: {problem}")
        if not own:
            return run.path / "objects"
    return place / "objects"


def shortage(config: TransportConfig, budget: int) -> str:
    """What keeps a run's objects of `budget` bytes out of memory, and the remedy; empty if they fit."""
    memory = Path(config.folder) if config.folder and config.kind != "stored" else shared_memory_folder()
    there = existing(memory)
    # With other kinds the run folder is used already.
    otherwise = ", or set transport.kind=auto to use the run folder" if config.kind == "arena" else ""
    if config.folder is None and there != memory:
        return f"{memory} does not exist: set transport.folder{otherwise}"
    if not os.access(there, os.W_OK | os.X_OK):
        another = "transport.folder to another folder" if config.folder else "$DRAFTSMITH_SHM to a tmpfs of yours"
        return f"{there} is not writable: make it so, or set {another}{otherwise}"
    room, wanted = os.statvfs(there), _object_bytes(config, budget) + SPARE
    free = room.f_frsize * room.f_bavail
    if free >= wanted:
        return ""
    return (
        f"{free // 2**20} MiB are free in {memory}, and {-(-wanted // 2**20)} MiB are needed: make it larger (for a "
        f"container, --shm-size), or lower transport.budget_mib{otherwise}"
    )


def _object_bytes(config: TransportConfig, budget: int) -> int:
    """Bytes that a run's objects take at most."""
    return store_bytes(budget) if config.kind == "mooncake" else budget + BEYOND_BUDGET


class NoRoomError(Refusal):
    """The disk is too small for a round of hidden states."""


def round_bytes(config: TransportConfig, run: Path, epoch_bytes: int, checkpoints: int, needed: int) -> int:
    """Bytes of a round of capture and training in turns (pools.sharing=alternate).

    Files take a whole epoch, or half of what is free in their folder, by default that of the run `run`, besides
    `checkpoints` bytes. Memory has the budget of samples in flight, which may need `needed`. Raises NoRoomError for a
    round that the disk has no room for.
    """
    if config.kind in IN_MEMORY:
        return memory_budget(config, needed)
    wanted = epoch_bytes if config.round_mib is None else min(epoch_bytes, config.round_mib * 2**20)
    if config.kind == "stored":
        return wanted  # stored objects stay, so all must fit anyway
    folder = run if config.folder is None else Path(config.folder)
    there = existing(folder)
    free = shutil.disk_usage(there).free
    if config.round_mib is not None and wanted > free:
        raise NoRoomError(
            f"transport.round_mib={config.round_mib}: {folder} has {free // 2**20} MiB free: lower it, leave it out, "
            "or name another transport.folder"
        )
    if config.round_mib is not None:
        return wanted
    kept = checkpoints if there.stat().st_dev == existing(run).stat().st_dev else 0
    room = max(0, free - kept) // 2
    if room < min(wanted, needed):
        raise NoRoomError(
            f"{folder} has {byte_size(free)} free, and a round of hidden states takes half of what the run's "
            f"checkpoints ({byte_size(kept)}) leave of it, at least {byte_size(min(wanted, needed))}: free some, keep "
            "fewer checkpoints (training.keep_checkpoints), or name a transport.folder on another disk"
        )
    return min(wanted, room)


def resolved(config: TransportConfig, run: RunFolder) -> TransportConfig:
    """`config` for a process that may see another file system: it names the shared memory that the run has.

    Such a process, in a container of its own, would by itself choose by the shared memory that it has.
    """
    if config.kind in IN_FOLDERS and config.folder is not None:
        return config.model_copy(update={"folder": str(Path(config.folder).absolute())})
    place = run_memory_folder(run)
    has_place = config.kind in IN_FOLDERS and os.path.isdir(place)
    if not has_place or objects_folder(config, run).parent != place:
        return config
    kind = "arena" if config.kind == "auto" else config.kind
    return config.model_copy(update={"kind": kind, "folder": str(place.parent)})


def missing_place(config: TransportConfig, run: RunFolder) -> Path | None:
    """The folder of the run, or that of its objects, which its owner has made and this process does not see."""
    places = [run.path]
    if config.kind in IN_FOLDERS and config.folder is not None:
        places.append(Path(config.folder) / f"draftsmith-{run.name}")
    return next((place for place in places if not place.is_dir()), None)


def open_transport(config: TransportConfig, run: RunFolder, joins: bool = False) -> Transport:
    """The transport of this run, for this process.

    `joins`: for a process that serves users. It makes no place for objects, which another one has made, and does not
    stop its other threads while it opens one. Raises Refusal where it does not see the place.
    """
    if config.kind == "stored":
        assert config.folder is not None, "checked with the recipe"
        return StoredTransport(config.folder)
    if config.kind == "mooncake":
        return MooncakeTransport(StoreRecord.read(run.store))
    folder = objects_folder(config, run)
    if joins and not folder.is_dir():
        raise Refusal(unseen(folder))
    if config.kind == "arena" or (config.kind == "auto" and folder.is_relative_to(run_memory_folder(run))):
        return ArenaTransport(folder, _object_bytes(config, budget_of(config, run)), populate=not joins)
    return FileTransport(folder)


def unseen(place: Path) -> str:
    """What is wrong where a server does not see a folder of the run, and the remedy."""
    return (
        f"the server does not see the run's folder {place}: in a container, mount the folder of runs and /dev/shm of "
        "the host into it at the same paths (for shared memory also --ipc=host)"
    )


def sweep(transport: Transport, held_keys: Callable[[], set[str]]) -> None:
    """Delete objects that no row of the ledger holds: leftovers of killed processes. `held_keys`: the ledger's.

    The store is listed first, then the ledger: a key that is leased and written in between is held.
    """
    for key in set(transport.keys()) - held_keys():
        if CANARY not in key:
            transport.delete(key)
