"""Removes old runs that nobody runs: their folders and their rows in a shared ledger.

What a run came to is in MLflow; its folder holds checkpoints, export, logs and ledger.
"""

import json
import shutil
import time
from collections import defaultdict
from pathlib import Path

from infra.files.locks import LockHeldError, hold
from infra.files.run_folder import RunFolder
from infra.ledger.ledger import Ledger

DAY_S = 86_400.0


def old_runs(runs: Path, keep: int, unfinished_days: float) -> list[RunFolder]:
    """Finished runs except the newest `keep` of each recipe, and unfinished ones unchanged for `unfinished_days`."""
    finished: dict[str, list[RunFolder]] = defaultdict(list)
    old: list[RunFolder] = []
    for config in runs.glob("*/config.json"):
        folder = RunFolder(config.parent)
        if is_finished(folder):
            finished[str(json.loads(config.read_text()).get("name"))].append(folder)
        elif time.time() - _touched(folder) > unfinished_days * DAY_S:
            old.append(folder)
    for of_recipe in finished.values():
        old += sorted(of_recipe, key=_touched, reverse=True)[keep:]
    return old


def is_finished(folder: RunFolder) -> bool:
    """Whether a run is complete: a retraining has its report, another run its result."""
    trains = folder.metrics.exists() or folder.ledger_file.exists()
    return folder.report.exists() or (not trains and (folder.smoke.exists() or folder.benchmark.exists()))


def _touched(folder: RunFolder) -> float:
    """Seconds since 1970 of the last change of anything directly in the folder."""
    return max(path.stat().st_mtime for path in (folder.path, *folder.path.iterdir()))


def remove(folder: RunFolder) -> bool:
    """Remove a run's folder and its rows in a shared ledger; False where somebody runs it now.

    The rows go first: interrupted in between, the folder is still there and the next clean-up continues.
    """
    try:
        with hold(folder.run_lock), hold(folder.path / "processes.lock"):
            url = json.loads(folder.config.read_text()).get("ledger", {}).get("url")
            if url:
                with Ledger.open(url, folder.name) as ledger:
                    ledger.delete_run()
            aside = folder.path.with_name(f".removed-{folder.name}")
            folder.path.rename(aside)
    except LockHeldError:
        return False
    shutil.rmtree(aside)
    return True


def remove_rest(runs: Path) -> None:
    """Finish removals that were interrupted."""
    for aside in runs.glob(".removed-*"):
        shutil.rmtree(aside)
