"""What Slurm's commands say at sites that differ from ours, played by scripts, and the job's watch over its run."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from infra.config import PoolsConfig
from infra.pools import slurm_engine, slurm_job
from infra.pools.base import PoolSpec, ReleaseError
from infra.pools.engine import Request
from infra.pools.queued import QueuedPools, divide
from infra.pools.run_pools import SinglePools
from infra.pools.slurm_engine import SlurmEngine, dry_run
from infra.processes.process import Owner, ProcessFailedError

CONFIG = PoolsConfig.model_validate({"kind": "slurm", "cores_per_gpu": 1, "slurm": {"partition": "gpu"}})
SPECS = [PoolSpec("training", 2)]
SINFO = 'case "$*" in *%R*) echo "cpu\nlong" ;; *--partition=gpu*) echo "n1|16|gpu:4" ;; esac'
Say = Callable[..., None]
Hold = Callable[..., None]


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
def hold(tmp_path: Path) -> Iterator[Hold]:
    """A holder in this process."""

    def hold(partition: str = "gpu", specs: Sequence[PoolSpec] = SPECS) -> None:
        config = CONFIG.model_copy(update={"slurm": CONFIG.slurm.model_copy(update={"partition": partition})})
        SlurmEngine(config).hold(Request(owner="run", folder=str(tmp_path), pools=divide(specs, config)))

    before = signal.getsignal(signal.SIGTERM)
    yield hold
    signal.signal(signal.SIGTERM, before)


def test_a_job_that_slurm_would_never_start_is_refused(
    slurm_says: Say, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reasons of all its components count."""
    monkeypatch.setattr(slurm_engine, "HOPELESS_S", 0.0)
    slurm_says(sbatch="echo 17", squeue=queue("echo 'PENDING|PartitionTimeLimit\nPENDING|Priority'"))
    with pytest.raises(ValueError, match="would never start the job 17: PartitionTimeLimit"):
        hold()


def test_a_reason_counts_once_it_has_lasted() -> None:
    since = slurm_engine.refuse_what_never_starts("17", ["InvalidQOS", "Priority"], {}, 100.0)
    assert since == {"InvalidQOS": 100.0}
    since = slurm_engine.refuse_what_never_starts("17", ["InvalidQOS"], since, 189.0)
    assert slurm_engine.refuse_what_never_starts("17", ["Resources"], since, 189.5) == {}
    with pytest.raises(ValueError, match="would never start the job 17: InvalidQOS"):
        slurm_engine.refuse_what_never_starts("17", ["InvalidQOS"], since, 190.0)


def test_the_reason_of_one_of_several_partitions_refuses_nothing(
    slurm_says: Say, hold: Hold, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm tells that of the partition that it tried last, which another one's machines may make up for."""
    monkeypatch.setattr(slurm_engine, "HOPELESS_S", 0.0)
    looks = tmp_path / "looks"
    state = f"echo >> {looks}; [ $(wc -l < {looks}) -gt 1 ] || echo 'PENDING|PartitionTimeLimit'"
    slurm_says(sinfo='echo "n1|16|gpu:4"', sbatch="echo 17", squeue=queue(state), scontrol="echo JobState=CANCELLED")
    with pytest.raises(ValueError, match=r"^the Slurm job 17 has ended \(CANCELLED\)"):
        hold("gpu,gpu-long")


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


@pytest.mark.parametrize(
    "submits",
    [
        "echo 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 1",
        "exec sleep 60",
        "kill $$",  # as the holder's supervisor does, which ends the whole group
    ],
)
def test_a_job_that_sbatch_knows_nothing_of_is_withdrawn(
    slurm_says: Say, hold: Hold, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, submits: str, capsys
) -> None:
    """It may appear after the first look. Status 1 is no refusal, so that `release` looks for it, too."""
    monkeypatch.setattr(slurm_engine, "SUBMIT_S", 2.0)
    monkeypatch.setattr(slurm_engine, "APPEARS_S", 2.0)
    commands, looks = job(tmp_path), tmp_path / "looks"
    appears = f"[ ! -e {tmp_path}/asked ] || echo >> {looks}; [ -e {looks} ] && [ $(wc -l < {looks}) -gt 2 ] || exit 0"
    slurm_says(
        **commands | {
            "sbatch": f"touch {tmp_path}/asked {tmp_path}/submitted; {submits}",
            "squeue": f"{appears}\n{commands['squeue']}",
        }
    )  # fmt: skip
    with pytest.raises(SystemExit, match="1"):
        hold()
    assert (tmp_path / "cancelled").exists()
    assert "may have submitted the job or not: sbatch" in capsys.readouterr().err


AWAY = "echo 'squeue: error: Unable to contact slurm controller (connect failure)' >&2; exit 1"


def test_why_a_job_failed_is_told_although_it_cannot_be_withdrawn_now(slurm_says: Say, tmp_path: Path) -> None:
    commands = job(tmp_path)
    refuses = f"touch {tmp_path}/submitted; echo 'sbatch: error: Invalid account' >&2; exit 1"
    slurm_says(**commands | {"sbatch": refuses, "squeue": f"[ ! -e {tmp_path}/submitted ] || {{ {AWAY}; }}"})
    pools = QueuedPools(CONFIG, 60.0)
    with pytest.raises(ProcessFailedError, match="Slurm refuses the job: sbatch: Invalid account"):
        pools.acquire(SPECS, Owner("run", tmp_path / "logs"))
    slurm_says(**commands)
    pools.release("run")
    assert (tmp_path / "cancelled").exists()


def test_a_lease_takes_away_what_the_last_one_of_its_owner_left(slurm_says: Say, tmp_path: Path) -> None:
    commands, pools, owner = job(tmp_path), QueuedPools(CONFIG, 60.0), Owner("run", tmp_path / "logs")
    commands["sbatch"] = f"rm -f {tmp_path}/cancelled; {commands['sbatch']}"
    slurm_says(**commands)
    pools.acquire(SPECS, owner)
    slurm_says(**commands | {"squeue": AWAY, "sinfo": AWAY})
    with pytest.raises(ReleaseError, match=r"^squeue: Unable to contact .*failure\); .* within six minutes$"):
        pools.release("run")
    with pytest.raises(ValueError, match="Unable to contact"):
        pools.acquire(SPECS, owner)
    once = tmp_path / "once"
    slurm_says(**commands | {"sinfo": f"[ -e {once} ] || {{ touch {once}; {AWAY}; }}\n{SINFO}"})
    pools.release("run")
    assert (tmp_path / "cancelled").exists()
    (tmp_path / "cancelled").unlink()  # as if the job were there again
    (pool,) = pools.acquire([PoolSpec("inference", 2)], owner)
    assert (pool.gpus, once.exists()) == (("n1:0", "n1:1"), True)
    pools.release("run")


def test_a_withdrawal_waits_for_commands_but_not_for_an_epilog(
    slurm_says: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_engine, "POLL_S", 0.01)
    looks = tmp_path / "looks"
    slurm_says(squeue=f"echo >> {looks}; [ $(wc -l < {looks}) -gt 3 ] || echo COMPLETING")
    SlurmEngine(CONFIG).withdraw("draftsmith-run")
    assert looks.read_text().count("\n") == 4
    monkeypatch.setattr(slurm_engine, "KILLED_S", 0.1)
    slurm_says(squeue="echo COMPLETING")
    SlurmEngine(CONFIG).withdraw("draftsmith-run")


def test_what_cannot_be_dealt_out_evenly_is_told_after_slurms_reason(slurm_says: Say, hold: Hold) -> None:
    refuses = "echo 'sbatch: error: Requested node configuration is not available' >&2; exit 1"
    slurm_says(sinfo="echo 'n1|16|gpu:8'", squeue="", sbatch=refuses)
    with pytest.raises(
        ValueError, match=r"refuses the job: sbatch: Requested node.*; the inference pool's GPUs.* 2, 1"
    ):
        hold(specs=[PoolSpec("inference", 3, parts=2), *SPECS])


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
    held: dict[str, int] = {}
    provider = QueuedPools(CONFIG, 60.0)
    singles = SinglePools(provider, SPECS[0], owner, noted=held.__setitem__, warn=warnings.append)
    singles.acquire("generator-0")
    slurm_says(**{**commands, "squeue": AWAY})
    singles.close()
    (warning,) = warnings
    assert warning.startswith("the devices are not given back: squeue: Unable to contact slurm controller")
    assert held == {"run-generator-0": 0}


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
