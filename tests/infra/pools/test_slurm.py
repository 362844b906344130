"""What Slurm's commands say at sites that differ from ours, played by scripts, and the job's watch over its run."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.config import PoolsConfig
from infra.pools import slurm_job
from infra.pools.base import PoolSpec
from infra.pools.engine import Request
from infra.pools.queued import QueuedPools, divide
from infra.pools.slurm_engine import SlurmEngine, dry_run
from infra.processes.process import Owner

CONFIG = PoolsConfig.model_validate({"kind": "slurm", "cores_per_gpu": 1, "slurm": {"partition": "gpu"}})
SPECS = [PoolSpec("training", 2)]
SINFO = 'case "$*" in *%R*) echo "cpu\nlong" ;; *--partition=gpu*) echo "n1|16|gpu:4" ;; esac'
Say = Callable[..., None]


@pytest.fixture
def slurm_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Say:
    """Makes commands of Slurm's out of shell scripts."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def say(**scripts: str) -> None:
        for name, script in {"sinfo": SINFO, "scancel": "", **scripts}.items():
            command = tmp_path / name
            command.write_text(f"#!/bin/sh\n{script}\n")
            command.chmod(0o755)

    return say


def said_by_acquire(folder: Path) -> str:
    pools, owner = QueuedPools(CONFIG, 60.0), Owner("run", folder / "logs")
    with pytest.raises(ValueError) as refused:
        pools.acquire(SPECS, owner)
    return str(refused.value)


def queue(state: str) -> str:
    """A squeue that knows a job once it is submitted, by number; it lists none by name."""
    return f'case "$*" in *--jobs=17*) {state} ;; esac'


def test_a_partition_that_does_not_exist_is_named(slurm_says: Say) -> None:
    slurm_says(sinfo='case "$*" in *%R*) echo "cpu\nlong" ;; esac')
    with pytest.raises(ValueError, match=r"pools.slurm.partition=gpu: .*there are cpu, long$"):
        dry_run("tiny", SPECS, CONFIG)


def test_a_job_that_slurm_would_never_start_is_refused(slurm_says: Say, tmp_path: Path) -> None:
    slurm_says(sbatch="echo 17", squeue=queue("echo 'PENDING|PartitionTimeLimit'"))
    assert "would never start the job 17: PartitionTimeLimit" in said_by_acquire(tmp_path)


def test_the_end_of_a_job_is_told(slurm_says: Say, tmp_path: Path) -> None:
    banner = "echo '*** Welcome to the cluster ***'; echo '17;main'"
    slurm_says(sbatch=banner, squeue="", scontrol="echo '   JobState=TIMEOUT Reason=TimeLimit'")
    said = said_by_acquire(tmp_path)
    assert said.startswith("the Slurm job 17 has ended (TIMEOUT)")
    assert "draftsmith retrain --resume RUN" in said


def test_a_refusal_of_slurm_is_whole(slurm_says: Say, tmp_path: Path) -> None:
    slurm_says(squeue="", sbatch="echo 'sbatch: error: Unable to allocate resources: Invalid account' >&2; exit 1")
    assert said_by_acquire(tmp_path).startswith(
        "Slurm refuses the job: sbatch: Unable to allocate resources: Invalid account; see pools.slurm"
    )
    slurm_says(sinfo="echo 'slurm_load_partitions: Unable to contact slurm controller' >&2; exit 1")
    assert said_by_acquire(tmp_path) == "slurm_load_partitions: Unable to contact slurm controller"


def test_jobs_are_found_whatever_the_environment_calls_the_user(slurm_says: Say, monkeypatch) -> None:
    """As after `su`, or in a container that keeps the $USER of its starter."""
    slurm_says(squeue=f'case "$*" in *--user={os.getuid()}\\ *) echo 17 ;; esac')
    for variable in ("USER", "LOGNAME"):
        monkeypatch.setenv(variable, "somebody-else")
    assert SlurmEngine(CONFIG).holds("draftsmith-run")


SLEEP = """#!/bin/sh
echo >> {folder}/looks
[ $(wc -l < {folder}/looks) -gt 30 ] || touch -d "1999-01-01 00:00:$(wc -l < {folder}/looks)" '{alive}'
"""


@pytest.mark.parametrize("is_there", [True, False])
def test_a_job_watches_its_run_whatever_the_clocks_say(tmp_path: Path, is_there: bool) -> None:
    """The file's times are those of a file server, and it may come to be seen late."""
    logs = tmp_path / "the logs"
    logs.mkdir()
    request = Request(owner="run", folder=str(logs), pools=divide(SPECS, CONFIG))
    alive = slurm_job.alive_file(request)
    if is_there:
        alive.touch()
    commands = tmp_path / "commands"
    commands.mkdir()
    (commands / "sleep").write_text(SLEEP.format(folder=tmp_path, alive=alive))
    (commands / "sleep").chmod(0o755)
    script = slurm_job.script(request, [slurm_job.Component(parts=request.parts)], CONFIG.slurm)
    environment = {"PATH": f"{commands}:{os.environ['PATH']}"}
    subprocess.run(["sh", "-c", script], env=environment, timeout=60, check=True)
    assert (tmp_path / "looks").read_text().count("\n") == 40
