"""What Slurm's commands say at sites that differ from ours, played by scripts, and the job's watch over its run."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from infra.config import PoolsConfig
from infra.pools import slurm_engine, slurm_job
from infra.pools.base import PoolSpec
from infra.pools.engine import Request
from infra.pools.queued import QueuedPools, divide
from infra.pools.run_pools import SinglePools
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


@pytest.fixture
def said_by_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """What a holder in this process refuses a job for that seems hopeless, by the recipe's partition."""
    monkeypatch.setattr(slurm_engine, "HOPELESS_S", 0.0)
    request = Request(owner="run", folder=str(tmp_path), pools=divide(SPECS, CONFIG))

    def hold(partition: str) -> str:
        config = CONFIG.model_copy(update={"slurm": CONFIG.slurm.model_copy(update={"partition": partition})})
        with pytest.raises(ValueError) as refused:
            SlurmEngine(config).hold(request)
        return str(refused.value)

    before = signal.getsignal(signal.SIGTERM)
    yield hold
    signal.signal(signal.SIGTERM, before)


def test_a_job_that_slurm_would_never_start_is_refused(slurm_says: Say, said_by_hold: Callable[[str], str]) -> None:
    """The reasons of all its components count."""
    slurm_says(sbatch="echo 17", squeue=queue("echo 'PENDING|PartitionTimeLimit\nPENDING|Priority'"))
    assert "would never start the job 17: PartitionTimeLimit" in said_by_hold("gpu")


def test_a_reason_counts_once_it_has_lasted() -> None:
    since = slurm_engine.refuse_what_never_starts("17", ["InvalidQOS", "Priority"], {}, 100.0)
    assert since == {"InvalidQOS": 100.0}
    since = slurm_engine.refuse_what_never_starts("17", ["InvalidQOS"], since, 189.0)
    assert slurm_engine.refuse_what_never_starts("17", ["Resources"], since, 189.5) == {}
    with pytest.raises(ValueError, match="would never start the job 17: InvalidQOS"):
        slurm_engine.refuse_what_never_starts("17", ["InvalidQOS"], since, 190.0)


def test_the_reason_of_one_of_several_partitions_refuses_nothing(
    slurm_says: Say, said_by_hold: Callable[[str], str], tmp_path: Path
) -> None:
    """Slurm tells that of the partition that it tried last, which another one's machines may make up for."""
    looks = tmp_path / "looks"
    state = f"echo >> {looks}; [ $(wc -l < {looks}) -gt 1 ] || echo 'PENDING|PartitionTimeLimit'"
    slurm_says(sinfo='echo "n1|16|gpu:4"', sbatch="echo 17", squeue=queue(state), scontrol="echo JobState=CANCELLED")
    assert said_by_hold("gpu,gpu-long").startswith("the Slurm job 17 has ended (CANCELLED)")


def job(folder: Path, running: str = "echo 'RUNNING|None'") -> dict[str, str]:
    """An sbatch, a squeue and a scancel that know of one job."""
    is_there = f"[ ! -e {folder}/submitted ] || [ -e {folder}/cancelled ]"
    return {
        "sbatch": f"touch {folder}/submitted; echo 17",
        "squeue": f'{is_there} || case "$*" in *--jobs=17*) {running} ;; *) echo RUNNING ;; esac',
        "scancel": f"touch {folder}/cancelled",
        "scontrol": "printf 'JobId=17\\n     Nodes=n1 CPU_IDs=0-1 Mem=0 GRES=gpu:2(IDX:0-1)\\n'",
    }


def test_a_busy_controller_does_not_cost_the_job(slurm_says: Say, tmp_path: Path) -> None:
    once, commands = tmp_path / "once", job(tmp_path)
    fails = f"[ -e {once} ] || {{ touch {once}; echo 'error: Socket timed out on send/recv operation' >&2; exit 1; }}"
    slurm_says(**{**commands, "scontrol": f"{fails}\n{commands['scontrol']}"})
    pools = QueuedPools(CONFIG, 60.0)
    (pool,) = pools.acquire(SPECS, Owner("run", tmp_path / "logs"))
    assert (pool.gpus, once.exists()) == (("n1:0", "n1:1"), True)
    pools.release("run")
    assert (tmp_path / "cancelled").exists()


def test_a_job_that_sbatch_knows_nothing_of_is_withdrawn(slurm_says: Say, tmp_path: Path) -> None:
    submits = f"touch {tmp_path}/submitted; echo 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 1"
    slurm_says(**{**job(tmp_path), "sbatch": submits})
    assert "Socket timed out" in said_by_acquire(tmp_path)
    assert (tmp_path / "cancelled").exists()


def test_options_may_leave_only_machines_that_are_too_small_for_both_pools(slurm_says: Say, tmp_path: Path) -> None:
    commands = job(tmp_path)
    says = "sbatch: error: Batch job submission failed: Requested node configuration is not available"
    refuses = f"grep -q hetjob || {{ echo '{says}' >&2; exit 1; }}"
    slurm_says(
        **commands | {
            "sbatch": f"{refuses}\n{commands['sbatch']}",
            "scontrol": f"{commands['scontrol']}\n{commands['scontrol'].replace('=n1', '=n2')}",
        }
    )  # fmt: skip
    pools = QueuedPools(CONFIG, 60.0)
    granted = pools.acquire([PoolSpec("inference", 2), *SPECS], Owner("run", tmp_path / "logs"))
    assert [pool.gpus for pool in granted] == [("n1:0", "n1:1"), ("n2:0", "n2:1")]
    pools.release("run")


def test_a_job_whose_machines_are_cleaned_up_holds_nothing(slurm_says: Say) -> None:
    """An epilog may take minutes."""
    slurm_says(squeue="echo COMPLETING")
    assert not SlurmEngine(CONFIG).holds("draftsmith-run")


def test_devices_that_are_not_given_back_do_not_fail_what_is_done(slurm_says: Say, tmp_path: Path) -> None:
    warnings: list[str] = []
    commands, owner = job(tmp_path), Owner("run", tmp_path / "logs")
    slurm_says(**commands)
    singles = SinglePools(QueuedPools(CONFIG, 60.0), SPECS[0], owner, warn=warnings.append)
    singles.acquire("generator-0")
    slurm_says(**{**commands, "squeue": "echo 'error: Unable to contact slurm controller' >&2; exit 1"})
    singles.close()
    (warning,) = warnings
    assert "within six minutes" in warning


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
    slurm_says(squeue=f'case "$*" in *--user={os.getuid()}\\ *) echo RUNNING ;; esac')
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
