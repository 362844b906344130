"""MLflow's tables are made in memory."""

from pathlib import Path

import pytest


@pytest.fixture
def tmp_path(path_in_memory: Path) -> Path:
    """Nothing here is about a disk."""
    return path_in_memory
