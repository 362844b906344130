"""Bounds the files that grow while schedules run: the cache, sampled prompts and logs."""

import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from filelock import FileLock, Timeout

DAY_S = 86_400.0
CACHE_FOLDERS = ("targets", "samples", "sources")
"""Filled by `infra.files.cached_folder.build_once`, which renews the modification time of what it finds there."""
COPY_BYTES = 2**20


def remove_unused_cache(cache: Path, days: float) -> list[Path]:
    """Remove what no run has used for `days`; return it. Whatever is removed can be built again from its source."""
    removed = []
    for kind in CACHE_FOLDERS:
        for folder in cache.glob(f"{kind}/[!.]*"):
            try:
                # The lock under which the folder is built: nobody can find it half-removed.
                with FileLock(folder.with_name(f".{folder.name}.lock"), timeout=0):
                    if _is_older(folder, days):
                        aside = folder.with_name(f".{folder.name}.removed")
                        folder.rename(aside)
                        removed.append(folder)
                        shutil.rmtree(aside)
            except Timeout:
                continue
        for aside in cache.glob(f"{kind}/.*.removed"):  # an interrupted removal
            shutil.rmtree(aside)
    return removed + _remove_files(cache.glob("regenerated/*.jsonl"), days)


def remove_old_prompts(drift: Path, days: float) -> list[Path]:
    """Remove prompt samples of request logs older than `days`; return them. The retraining that used one is over."""
    return _remove_files(drift.glob("*/prompts-*.jsonl"), days)


def bound_logs(logs: Iterable[Path], most_bytes: int) -> list[Path]:
    """Cut logs larger than `most_bytes`: their last `most_bytes` move to `NAME.1`. Return the logs that were cut.

    A log stays the same file, because its writer has it open (in append mode, so that it goes on at the new end).
    Lines that are written while the end is copied can be lost.
    """
    cut = []
    for log in logs:
        if log.stat().st_size <= most_bytes:
            continue
        with log.open("rb+") as source, log.with_name(f"{log.name}.1").open("wb") as copy:
            source.seek(-most_bytes, 2)
            shutil.copyfileobj(source, copy, COPY_BYTES)
            source.truncate(0)
        cut.append(log)
    return cut


def _remove_files(files: Iterable[Path], days: float) -> list[Path]:
    old = [file for file in files if _is_older(file, days)]
    for file in old:
        file.unlink(missing_ok=True)
    return old


def _is_older(path: Path, days: float) -> bool:
    try:
        return time.time() - path.stat().st_mtime > days * DAY_S
    except FileNotFoundError:
        return False
