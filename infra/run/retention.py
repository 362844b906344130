"""Bounds what grows while schedules run: old runs, the cache, sampled prompts and logs."""

import json
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from infra.files.locks import LockHeldError, hold
from infra.files.private import MARK
from infra.files.run_folder import RunFolder, newest_runs
from infra.ledger.ledger import Ledger
from infra.refusal import Refusal

DAY_S = 86_400.0
CACHE_FOLDERS = ("targets", "samples", "sources")
"""Filled by `infra.files.cached_folder.build_once`, which renews the modification time of what it finds there."""
COPY_BYTES = 2**20


def old_runs(runs: Path, keep: int, unfinished_days: float, prompt_days: float) -> list[RunFolder]:
    """Finished runs except the newest `keep` of each recipe, unfinished ones unchanged for `unfinished_days`, those
    whose prompts were sampled from request logs longer ago than `prompt_days`, and those that learned from users longer
    ago than their recipes' `generator.live.retention_days`.

    Runs of other users that cannot be removed are named and passed over.
    """
    finished: dict[str, list[RunFolder]] = defaultdict(list)
    old: list[RunFolder] = []
    for folder in newest_runs(runs):
        if not _is_removable(folder.path):
            continue
        recipe = _recipe_of(folder)
        live = recipe.get("generator", {}).get("live")
        if _is_older(folder.path / MARK, prompt_days) or (live and _is_older(folder.live, live["retention_days"])):
            old.append(folder)
        elif is_finished(folder):
            finished[str(recipe.get("name"))].append(folder)
        elif time.time() - _touched(folder) > unfinished_days * DAY_S:
            old.append(folder)
    for of_recipe in finished.values():
        old += sorted(of_recipe, key=_touched, reverse=True)[keep:]
    return old


def _is_removable(path: Path) -> bool:
    """Whether this user may remove a file, or a folder with all in it; what stays is named.

    Asked first: a folder half of which is removed is no run any more, and neither is it gone.
    """
    places = [path.parent, *(Path(place) for place, _, _ in os.walk(path))]
    if all(os.access(place, os.R_OK | os.W_OK | os.X_OK) for place in places):
        return True
    print(f"{path} belongs to user {path.lstat().st_uid} and cannot be removed: it stays", flush=True)
    return False


def _recipe_of(folder: RunFolder) -> dict[str, Any]:
    """A run's recipe; an empty one for a damaged file, which keeps no other run from being removed."""
    try:
        return json.loads(folder.config.read_text())
    except ValueError:
        return {}


def is_finished(folder: RunFolder) -> bool:
    """Whether a run is complete: a retraining has its report, another run its result."""
    trains = folder.metrics.exists() or folder.ledger_file.exists()
    return folder.report.exists() or (not trains and (folder.smoke.exists() or folder.benchmark.exists()))


def _touched(folder: RunFolder) -> float:
    """Seconds since 1970 of the last change of anything directly in the folder."""
    times = [folder.path.stat().st_mtime]
    for path in folder.path.iterdir():
        with suppress(FileNotFoundError):  # a file that was just written under its own name
            times.append(path.stat().st_mtime)
    return max(times)


def remove(folder: RunFolder) -> bool:
    """Remove a run's folder and its rows in a shared ledger; False where somebody runs it now.

    What the run came to is in MLflow; its folder holds checkpoints, export, logs and ledger.
    The rows go first: interrupted in between, the folder is still there and the next clean-up continues.
    """
    try:
        with hold(folder.run_lock), hold(folder.processes_lock):
            url = _recipe_of(folder).get("ledger", {}).get("url")
            if url:
                with Ledger.open(url, folder.name) as ledger:
                    ledger.delete_run()
            aside = folder.path.with_name(f".removed-{folder.name}")
            folder.path.rename(aside)
    except LockHeldError:
        return False
    shutil.rmtree(aside)
    return True


def remove_all(folders: Iterable[RunFolder]) -> tuple[list[str], list[str]]:
    """Remove runs; the names of those that went, and why others stay whose shared ledger cannot be written.

    What was told of a run before is printed and not returned: a ledger of another version never changes by itself.
    """
    gone, errors = list[str](), list[str]()
    for folder in folders:
        try:
            if remove(folder):
                gone.append(folder.name)
        except (Refusal, SQLAlchemyError) as error:
            why = f"run {folder.name} stays, because its rows cannot be removed: {error}"
            if isinstance(error, Refusal) and not _is_news(folder, why):
                print(why, flush=True)
            else:
                errors.append(why)
    return gone, errors


def _is_news(folder: RunFolder, why: str) -> bool:
    """Whether this was not told of the run before; from now on it was."""
    note, age = folder.path / "stays.txt", folder.path.stat()
    if note.is_file() and note.read_text() == why:
        return False
    with suppress(PermissionError):  # another user's of the same group
        note.write_text(why)
        for path in (note, folder.path):  # the run is as old as before
            os.utime(path, ns=(age.st_atime_ns, age.st_mtime_ns))
    return True


def remove_rest(runs: Path) -> None:
    """Finish removals that were interrupted."""
    for aside in runs.glob(".removed-*"):
        if _is_removable(aside):
            shutil.rmtree(aside)


def remove_unused_cache(cache: Path, days: float) -> list[Path]:
    """Remove what no run has used for `days`; return it. Whatever is removed can be built again from its source."""
    removed = []
    for kind in CACHE_FOLDERS:
        for folder in cache.glob(f"{kind}/[!.]*"):
            if _remove_cached(folder, folder, days):
                removed.append(folder)
        for aside in cache.glob(f"{kind}/.*.removed"):  # an interrupted removal
            shutil.rmtree(aside)
        for parts in cache.glob(f"{kind}/.*.parts"):  # of a preparation that nobody finished
            if _is_older(parts, days):
                shutil.rmtree(parts)
    return removed + _remove_files(cache.glob("regenerated/*.jsonl"), days)


def _remove_cached(folder: Path, dated: Path, days: float) -> bool:
    """Remove a folder of the cache if `dated` is older than `days`, unless somebody builds it; whether it is gone."""
    # `.NAME.building` and `.NAME.parts` are built under the same lock as NAME.
    name = folder.name[1:].rpartition(".")[0] if folder.name.startswith(".") else folder.name
    if not (_is_older(dated, days) and _is_removable(folder)):
        return False
    try:
        # The lock under which the folder is built: nobody can find it half-removed.
        with hold(folder.with_name(f".{name}.lock")):
            if not _is_older(dated, days):  # used meanwhile
                return False
            aside = folder.with_name(f".{folder.name}.removed")
            folder.rename(aside)
            shutil.rmtree(aside)
    except (LockHeldError, PermissionError):  # in use, or another user's of the same group
        return False
    return True


def remove_old_prompts(drift: Path, cache: Path, days: float) -> list[Path]:
    """Remove prompts that were sampled from request logs longer ago than `days`, and what of the cache was made of
    them; return it. The retraining that used them is over."""
    removed = _remove_files(drift.glob("*/prompts-*.jsonl"), days)
    removed += [mark.parent for mark in cache.glob(f"*/*/{MARK}") if _remove_cached(mark.parent, mark, days)]
    for mark in cache.glob(f"regenerated/*.{MARK}"):
        if not (_is_older(mark, days) and _is_removable(mark)):
            continue
        with suppress(LockHeldError), hold(mark.with_suffix(".lock")):
            # The mark goes last: an interrupted removal is finished by the next one.
            for file in sorted(mark.parent.glob(f"{mark.stem}.*"), key=lambda file: file == mark):
                if file.suffix != ".lock":
                    file.unlink(missing_ok=True)
            removed.append(mark.with_suffix(".jsonl"))
    return removed


def bound_logs(logs: Iterable[Path], most_bytes: int) -> list[Path]:
    """Cut logs larger than `most_bytes`: their last `most_bytes` move to `NAME.1`. Return the logs that were cut.

    A log stays the same file, because its writer has it open (in append mode, so that it goes on at the new end).
    Lines that are written while the end is copied can be lost.
    """
    cut = []
    for log in logs:
        if log.stat().st_size <= most_bytes or not os.access(log, os.R_OK | os.W_OK):
            continue
        with log.open("rb+") as source, log.with_name(f"{log.name}.1").open("wb") as copy:
            source.seek(-most_bytes, 2)
            shutil.copyfileobj(source, copy, COPY_BYTES)
            source.truncate(0)
        cut.append(log)
    return cut


def _remove_files(files: Iterable[Path], days: float) -> list[Path]:
    old = [file for file in files if _is_older(file, days) and _is_removable(file)]
    for file in old:
        file.unlink(missing_ok=True)
    return old


def _is_older(path: Path, days: float) -> bool:
    try:
        return time.time() - path.stat().st_mtime > days * DAY_S
    except FileNotFoundError:
        return False
