"""A few weeks of benchmarks/year.py: everything that schedules leave is written and cleaned by the real code."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

YEAR = Path(__file__).parents[1] / "benchmarks" / "year.py"
COMMITTED = YEAR.parent / "results" / "year.json"
WEEKS = 2


@pytest.mark.long
@pytest.mark.timeout(900)
def test_weeks_in_fast_motion(tmp_path: Path) -> None:
    result = tmp_path / "year.json"
    command = [sys.executable, str(YEAR), "--weeks", str(WEEKS), "--result", str(result)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=850, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    weeks = json.loads(result.read_text())["bytes_by_week"]
    assert len(weeks) == WEEKS
    assert all(size > 0 for size in weeks[-1].values()), weeks[-1]


def test_the_committed_year_is_bounded() -> None:
    year = json.loads(COMMITTED.read_text())
    assert year["weeks"] == 52
    assert year["bounded"], year["growth_in_the_last_weeks"]
