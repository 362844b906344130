"""Every fault that `make chaos` knows."""

from pathlib import Path

from faults.base import Fault, Ground, Scene
from faults.clock import JUMP_S, jump
from faults.database import frozen_client, locked_ledger
from faults.files import damage, delete_arena, flip_bit, lose_ledger, newest_checkpoint
from faults.processes import (
    kill,
    kill_flow,
    kill_postgres,
    lose_interface,
    partition_store,
    stop,
    stop_postgres,
)
from faults.space import fill, small_memory

DISK_FULL = r"(?i)no space left|disk is full|disk full|no room for"
DAMAGED = r"(?i)damaged"
STOP_S = (1.0, 15.0)
FULL_S = (2.0, 12.0)
LOCKED_S = (5.0, 90.0)
JUMPED_S = (3.0, 20.0)
CUT_S = (5.0, 25.0)

PROCESSES = ("generator", "rank", "generator and rank", "launcher", "supervisor")
STORE = ("master", "store")


def _mooncake(ground: Ground) -> bool:
    return ground.transport == "mooncake"


def _postgres(ground: Ground) -> bool:
    return ground.postgres is not None


def _sqlite(ground: Ground) -> bool:
    return ground.postgres is None


def _arena(ground: Ground) -> bool:
    return ground.transport == "arena"


def _stored(ground: Ground) -> bool:
    return ground.transport == "stored"


def _two_hosts(ground: Ground) -> bool:
    return ground.hosts is not None


def _mounts(ground: Ground) -> bool:
    return ground.mounts


def _has_clock(ground: Ground) -> bool:
    return ground.clock is not None


KILLS = (
    *(Fault(f"kill {kind}", kill(kind)) for kind in PROCESSES),
    *(Fault(f"kill {kind}", kill(kind), _mooncake) for kind in STORE),
    Fault("kill postgres", kill_postgres, _postgres),
    Fault("kill flow", kill_flow),
)

STOPS = (
    *(Fault(f"stop {kind}", stop(kind), lasts_s=STOP_S) for kind in (*PROCESSES, "flow")),
    *(Fault(f"stop {kind}", stop(kind), _mooncake, STOP_S) for kind in STORE),
    Fault("stop postgres", stop_postgres, _postgres, STOP_S),
)

NETWORKS = (
    Fault("lose interface", lose_interface, _two_hosts, (1.0, 6.0)),
    Fault("partition store", partition_store, _mooncake, CUT_S),
)

SPACE = (
    Fault("fill run folder", fill(lambda scene: scene.folder.path), _mounts, FULL_S, stops=DISK_FULL),
    Fault(
        "fill objects",
        fill(lambda scene: scene.objects),
        lambda ground: ground.mounts and ground.transport in ("files", "stored"),
        FULL_S,
        stops=DISK_FULL,
    ),
    Fault(
        "fill shared memory",
        fill(lambda scene: scene.memory),
        lambda ground: ground.mounts and ground.transport in ("arena", "mooncake"),
        FULL_S,
        stops=DISK_FULL,
    ),
    Fault(
        "small shared memory",
        small_memory,
        lambda ground: ground.mounts and ground.transport == "arena",
        phase="before",
        overrides=("transport.budget_mib=32", "transport.kind=auto"),
    ),
)

CLOCKS = tuple(
    Fault(f"clock {way}{kept}", jump(seconds, stays), _has_clock, (0.0, 0.0) if stays else JUMPED_S)
    for way, seconds in (("forward", JUMP_S), ("back", -JUMP_S))
    for kept, stays in (("", True), (" and again", False))
)

DATABASES = (
    Fault("lock ledger", locked_ledger, _sqlite, LOCKED_S),
    Fault("freeze ledger client", frozen_client, _postgres, phase="rest"),
)


def _damage(name: str, *patterns: str, stops: str | None = None, stored: bool = False, sqlite: bool = False) -> Fault:
    def files(scene: Scene) -> list[Path]:
        root = scene.objects if stored else scene.folder.path
        return [path for pattern in patterns for path in root.glob(pattern)]

    def applies(ground: Ground) -> bool:
        return (not stored or _stored(ground)) and (not sqlite or _sqlite(ground))

    return Fault(
        f"damage {name}", damage(files), applies, phase="dead", stops=stops, has_target=lambda scene: bool(files(scene))
    )


def _manifest(scene: Scene) -> list[Path]:
    return [path for path in newest_checkpoint(scene) if path.name == "manifest.json"]


def _has_checkpoint(scene: Scene) -> bool:
    return bool(newest_checkpoint(scene))


FILES = (
    _damage("config", "config.json", stops=DAMAGED),
    _damage("records", "target.json", "samples.json", "store.json", "training.json"),
    _damage("metrics", "metrics.jsonl"),
    _damage("logs", "logs/**/*.log"),
    _damage("ledger", "ledger.sqlite", sqlite=True),
    _damage("ledger log", "ledger.sqlite-wal", sqlite=True),
    _damage("held-out texts", "heldout.safetensors"),
    _damage("stored objects", "**/*", stored=True),
    Fault("damage checkpoint", damage(newest_checkpoint), phase="dead", has_target=_has_checkpoint),
    Fault("damage manifest", damage(_manifest), phase="dead", has_target=_has_checkpoint),
    Fault("flip bit in checkpoint", flip_bit, phase="dead", has_target=_has_checkpoint),
    Fault("lose ledger", lose_ledger, _sqlite, phase="dead"),
    Fault("delete arena", delete_arena, _arena),
)

FAULTS = (*KILLS, *STOPS, *NETWORKS, *SPACE, *CLOCKS, *DATABASES, *FILES)


def faults_on(ground: Ground) -> list[Fault]:
    """Those that can strike there."""
    return [fault for fault in FAULTS if fault.applies(ground)]
