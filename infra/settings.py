"""The one place that reads environment variables."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Converted targets and tokenized samples: $DRAFTSMITH_CACHE, or ~/.cache/draftsmith."""
    return Path(os.environ.get("DRAFTSMITH_CACHE", Path.home() / ".cache" / "draftsmith")).expanduser()


def runs_folder() -> Path:
    """Run folders: $DRAFTSMITH_RUNS, or ./runs."""
    return Path(os.environ.get("DRAFTSMITH_RUNS", "runs")).expanduser().absolute()


def tracking_uri() -> str:
    """MLflow: $MLFLOW_TRACKING_URI, or a SQLite file beside the run folders."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{runs_folder() / 'mlflow.db'}"


def shared_memory_folder() -> Path:
    """Where transports keep objects: $DRAFTSMITH_SHM, or /dev/shm."""
    return Path(os.environ.get("DRAFTSMITH_SHM", "/dev/shm"))


def rank_from_environment() -> tuple[int, int]:
    """(rank, world size) as torchrun sets them; (0, 1) without it."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
