"""The short form of `make chaos`: processes of real runs are killed at random moments, and nothing is lost."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from infra.records import TargetRecord

ROOT = Path(__file__).parents[1]
SEEDS = range(57, 65)
"""A short series in which everything is killed that `make chaos` kills."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_runs_under_fire_are_whole(tmp_path: Path, tiny_target: TargetRecord) -> None:
    result = tmp_path / "chaos.json"
    command = [sys.executable, "benchmarks/chaos.py", "--seeds", f"{SEEDS.start}:{SEEDS.stop}", "--side-by-side", "2"]
    command += ["--json", str(result)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1700, check=False)
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    found = json.loads(result.read_text())
    assert (found["runs"], found["failed"]) == (len(SEEDS), [])
    assert set(found["kills"]) >= {"generator", "rank", "torchrun", "supervisor", "flow", "master", "store", "postgres"}
    assert ("interface" in found["kills"]) == ("two hosts" in found["grounds"])
    assert found["resumed_by_a_fresh_flow"] > 0
