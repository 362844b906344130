"""Files that a crash of the machine, a broken disk or a person damages. Except for the arena, the run is dead then.

What is promised of each kind of file stands in docs/reliability.md, "Damaged files".
"""

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from faults.base import Missed, Scene, Strike

MODES = ("torn", "truncated", "zeroed")


def damage(files_of: Callable[[Scene], list[Path]]) -> Strike:
    """One of the files is torn, truncated or zeroed. It is put back, as from a backup, only when the run refuses it."""

    @contextmanager
    def strike(scene: Scene) -> Iterator[None]:
        files = sorted(file for file in files_of(scene) if file.is_file() and file.stat().st_size)
        if not files:
            raise Missed
        file, mode = scene.dice.choice(files), scene.dice.choice(MODES)
        whole = file.read_bytes()
        file.write_bytes(damaged_bytes(whole, mode, scene.dice))
        scene.note(f"{mode} {file.name}")
        yield
        if scene.has_stopped:
            file.write_bytes(whole)

    return strike


def damaged_bytes(whole: bytes, mode: str, dice: random.Random) -> bytes:
    """`torn`: cut within the last line; `truncated`: half of it is left, or nothing; `zeroed`: NULs in its place, or in
    that of its second half."""
    half = len(whole) // 2
    if mode == "torn":
        last_line = whole.rstrip(b"\n").rfind(b"\n") + 1
        return whole[: dice.randrange(last_line, len(whole))]
    if mode == "truncated":
        return whole[: dice.choice((0, half))]
    start = dice.choice((0, half))
    return whole[:start] + bytes(len(whole) - start)


def newest_checkpoint(scene: Scene) -> list[Path]:
    """Its files, the manifest among them; none where there is no checkpoint."""
    manifests = list(scene.folder.checkpoints.glob("step-*/manifest.json"))
    if not manifests:
        return []
    return list(max(manifests, key=lambda path: path.stat().st_mtime_ns).parent.iterdir())


@contextmanager
def flip_bit(scene: Scene) -> Iterator[None]:
    """One bit of the newest checkpoint."""
    files = sorted(newest_checkpoint(scene))
    if not files:
        raise Missed
    file = scene.dice.choice(files)
    data = bytearray(file.read_bytes())
    data[scene.dice.randrange(len(data))] ^= 1 << scene.dice.randrange(8)
    file.write_bytes(data)
    scene.note(file.name)
    yield


@contextmanager
def lose_ledger(scene: Scene) -> Iterator[None]:
    """The SQLite file is gone, with its log."""
    files = list(scene.folder.path.glob("ledger.sqlite*"))
    if not files:
        raise Missed
    for file in files:
        file.unlink()
    yield


@contextmanager
def delete_arena(scene: Scene) -> Iterator[None]:
    """Somebody cleans up shared memory while the run uses it."""
    home = scene.memory / f"draftsmith-{scene.folder.name}"
    wanted = scene.dice.choice(("arena", "extents", "objects", "everything"))
    paths = {
        "arena": [home / "objects" / "arena"],
        "extents": list((home / "objects").glob("extents*")),
        "objects": [home / "objects"],
        "everything": [home],
    }[wanted]
    if not (home / "objects" / "arena").exists():
        raise Missed
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    scene.note(wanted)
    yield
