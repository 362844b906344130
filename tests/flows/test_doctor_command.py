"""`draftsmith doctor` as a person runs it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHANGING = {"memory", "shared memory", "run folders in memory", "run folder", "cache folder"}
"""What other tests take and give back between two looks."""


def doctor(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI"):
        environment.pop(name, None)
    environment |= {"DRAFTSMITH_RUNS": str(folder / "runs"), "PREFECT_HOME": str(folder), **variables}
    command = [sys.executable, "-c", "from flows.command_line import main; main()", "doctor", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_status_tells_whether_there_is_a_problem_and_json_what_it_is(tmp_path: Path) -> None:
    well = doctor(tmp_path, "--json")
    findings = json.loads(well.stdout)
    assert all(set(finding) == {"name", "verdict", "found", "remedy"} for finding in findings)
    problems = [finding for finding in findings if finding["verdict"] == "problem"]
    assert (well.returncode, well.stderr) == (1 if problems else 0, "")
    ill = doctor(tmp_path, "--json", MLFLOW_TRACKING_URI="file:///old/mlruns")
    assert ill.returncode == 1
    more = [finding["name"] for finding in json.loads(ill.stdout) if finding["verdict"] == "problem"]
    lasting = [finding["name"] for finding in problems if finding["name"] not in CHANGING]
    assert [name for name in more if name not in CHANGING] == [*lasting, "MLflow"]


@pytest.mark.parametrize("columns", ["80", "160"])
def test_the_table_fits_and_shows_every_remedy(tmp_path: Path, columns: str) -> None:
    ended = doctor(tmp_path, COLUMNS=columns, MLFLOW_TRACKING_URI="file:///old/mlruns", LC_ALL="C", PYTHONUTF8="0")
    assert ended.returncode == 1
    lines = ended.stdout.splitlines()
    assert max(map(len, lines)) <= int(columns)
    words = " ".join(ended.stdout.split())
    assert "-> unset MLFLOW_TRACKING_URI" in words
    assert "fix first" in lines[-1]
    for finding in json.loads(doctor(tmp_path, "--json", MLFLOW_TRACKING_URI="file:///old/mlruns").stdout):
        assert finding["name"] in words
        assert finding["name"] in CHANGING or finding["remedy"].split(" ")[0] in words


def test_it_loads_nothing_heavy() -> None:
    script = """
import sys
from typer.testing import CliRunner
from flows.command_line import app
result = CliRunner().invoke(app, ["doctor"])
assert "Python" in result.output, result.output
heavy = {"torch", "prefect", "mlflow", "transformers", "lightning", "pandas"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=300, check=True)
