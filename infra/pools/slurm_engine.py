"""Pools that are a Slurm job: its components are the gang, every command is a step in it."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence

from infra.config import PoolsConfig
from infra.pools import slurm_job
from infra.pools.base import PoolSpec
from infra.pools.engine import GRACE_S, GRANTED, POLL_S, Engine, Grant, Machine, Request, run_task, say
from infra.pools.queued import divide
from infra.processes.exit import run_main
from infra.processes.process import guard
from infra.refusal import Refusal
from infra.settings import slurm_environment

HELD_S = 10.0
ANSWER_S = 60.0
"""Timeout of slurmctld, which may be busy."""
SUBMIT_S = 180.0
"""Timeout of sbatch, which itself tries for two minutes; one that is broken off may have submitted the job."""
APPEARS_S = 10.0
"""For how long such a job is looked for."""
AGAIN_S = 2.0
"""After this time a first question that failed is asked again: slurmctld may be restarting."""
KILLED_S = 45.0
"""Slurm kills the commands of a cancelled job after its KillWait, by default 30 s."""

TOGETHER = 'exec "$@" 2>&1'
"""So that all that srun prints to its own standard error is srun's."""
CHOOSE = 'CUDA_VISIBLE_DEVICES=$(echo "$CUDA_VISIBLE_DEVICES" | cut -d , -f "$0") exec "$@" 2>&1'
"""A step sees what its component has on the machine; its part of that is told by position, whatever Slurm numbers."""

EXIT_NOTICE = b": task 0: "
LOST = b"Node failure"
"""srun prints this when a machine is lost, and still exits as if the step had succeeded."""


NEVER = re.compile(r"PartitionTimeLimit|.*PerJob(Limit)?|BadConstraints|InvalidAccount|InvalidQOS|.*NotAllowed")
"""Reasons of a waiting job that only a change of the job or of the cluster's settings removes."""
HOPELESS_S = 90.0
"""For how long a job has such a reason before it is given up: Slurm also tells reasons that pass."""
TOO_LARGE = "Requested node configuration is not available"
"""sbatch prints this for what no machine has that the recipe's options leave."""


Components = tuple[slurm_job.Component, ...]


class SlurmError(Refusal):
    """A command of Slurm's failed; the message is its own."""


class SlurmTimeoutError(SlurmError):
    """A command of Slurm's had no answer."""


def ask(*command: str, text: str | None = None, timeout_s: float = ANSWER_S) -> str:
    """What a command of Slurm's prints. Raises SlurmError."""
    options = {"input": text, "capture_output": True, "text": True, "timeout": timeout_s, "env": slurm_environment()}
    try:
        done = subprocess.run(command, check=False, **options)
    except subprocess.TimeoutExpired as error:
        raise SlurmTimeoutError(f"{command[0]} had no answer within {timeout_s:g} s") from error
    if done.returncode < 0:  # what stops this process stops its whole group
        raise SlurmTimeoutError(f"{command[0]} was ended by signal {-done.returncode} before its answer")
    if done.returncode:
        said = done.stderr.strip().replace("error: ", "")  # which begins the last words of a process that refuses
        raise SlurmError(said or f"{command[0]} ended with exit code {done.returncode}")
    return done.stdout


def ask_machines(partition: str | None) -> list[Machine]:
    """Total resources of the partition's machines, or of all partitions if none is named.

    Raises Refusal for a partition that does not exist or has no machines.
    """
    chosen = [f"--partition={partition}"] if partition else []
    machines = slurm_job.machines(ask("sinfo", "--Node", "--noheader", "--format=%N|%c|%G", *chosen))
    if not machines and partition:
        there_are = ", ".join(ask("sinfo", "--noheader", "--format=%R").split())
        raise Refusal(
            f"pools.slurm.partition={partition}: Slurm knows no machine of such a partition; there are {there_are}"
        )
    return machines


def dry_run(name: str, specs: Sequence[PoolSpec], config: PoolsConfig) -> str:
    """The job's script for a run of that recipe; where no Slurm answers, as for machines too small for both pools.

    Raises Refusal, with the numbers, for what can never fit.
    """
    request = Request(owner=f"{name}-TIME", folder=f"runs/{name}-TIME/logs", pools=divide(specs, config))
    try:
        parts = slurm_job.components(request, ask_machines(config.slurm.partition))
    except (SlurmError, FileNotFoundError):
        parts = slurm_job.components_apart(request)
    return slurm_job.script(request, parts, config.slurm)


class SlurmEngine(Engine):
    """Slurm admits a job when all its components fit."""

    def hold(self, request: Request) -> None:
        """Submit the job, renew the sign of life that it watches, and cancel it at the end."""
        parts = slurm_job.components(request, self._machines())
        alive = slurm_job.alive_file(request)
        alive.touch()
        # Slurm may not have answered at the end of this owner's last lease, whose job would stay for minutes.
        self.withdraw(request.name)
        stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        # With several partitions the reason is that of the one that Slurm tried last; another's machines may do.
        is_conclusive = "," not in (self.config.slurm.partition or "")
        try:
            job, parts = self._submit(request, parts)
            granted, hopeless = False, dict[str, float]()
            while not stop.wait(HELD_S if granted else POLL_S):
                alive.touch()
                states = _states(job)
                if states is None:
                    continue  # slurmctld is restarting; jobs keep running meanwhile
                if not states:
                    raise Refusal(_ended(job))
                if granted:
                    continue
                reasons = {reason for _, reason in states}
                if {state for state, _ in states} == {"RUNNING"}:
                    granted = _print_grant(job, request, parts)
                    continue
                if is_conclusive:
                    hopeless = refuse_what_never_starts(job, reasons, hopeless, time.monotonic())
                say(f"Slurm's job {job} waits: {', '.join(sorted(reasons))}")
        finally:
            self._end(request.name, sys.exception())

    def _machines(self) -> list[Machine]:
        partition = self.config.slurm.partition
        try:
            return ask_machines(partition)
        except SlurmError:
            time.sleep(AGAIN_S)
            return ask_machines(partition)

    def _end(self, name: str, failure: BaseException | None) -> None:
        """Cancel the job. Where one may be left, this process ends with status 1, so that `release` withdraws it."""
        is_unclear = isinstance(failure, TimeoutError)
        deadline = time.monotonic() + APPEARS_S
        try:
            self.withdraw(name)
            while is_unclear and time.monotonic() < deadline:
                time.sleep(POLL_S)
                self.withdraw(name)
        except (SlurmError, TimeoutError) as error:
            failure, is_unclear = failure or error, True
        if is_unclear:
            print(f"error: {failure}", file=sys.stderr, flush=True)
            raise SystemExit(1)

    def _submit(self, request: Request, parts: Components) -> tuple[str, Components]:
        """The job's number, and its components: one for each pool where the machines left by `options` are too small
        for all in one. Raises TimeoutError where the job may have been submitted.
        """
        script = slurm_job.script(request, parts, self.config.slurm)
        try:
            return slurm_job.number(ask("sbatch", "--parsable", text=script, timeout_s=SUBMIT_S)), parts
        except SlurmError as error:
            if isinstance(error, SlurmTimeoutError) or "timed out" in str(error):
                raise TimeoutError(f"Slurm may have submitted the job or not: {error}") from error
            advice, apart = "see pools.slurm in the recipe", parts
            if TOO_LARGE in str(error):
                try:
                    apart = slurm_job.components_apart(request)
                except Refusal as uneven:
                    advice = str(uneven)
            if apart != parts:
                return self._submit(request, apart)
            raise Refusal(f"Slurm refuses the job: {error}; {advice}") from error

    def drive(self, allocation: str, place: Sequence[str], command: Sequence[str]) -> int:
        """Run the command as a step, under our supervisor.

        The supervisor's pipe from its starter is srun's standard input, held open here: SIGTERM closes it. When this
        process dies, so does srun, and Slurm ends the step.
        """
        positions, *options = place
        step = ["srun", f"--jobid={allocation}", "--overlap", "--export=ALL", "--unbuffered", "--quiet"]
        step += ["--nodes=1", "--ntasks=1", *options, *guard(GRACE_S), "--"]
        step += ["sh", "-c", CHOOSE, positions] if positions else ["sh", "-c", TOGETHER, "sh"]
        # In a group of its own: the signal that ends this process would have srun kill the step at once.
        running = subprocess.Popen(
            [*step, *command],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=slurm_environment(),
            process_group=0,
        )
        assert running.stdin is not None
        assert running.stderr is not None
        signal.signal(signal.SIGTERM, lambda *_: running.stdin and running.stdin.close())
        lost = False
        for line in running.stderr:
            lost = lost or LOST in line
            if EXIT_NOTICE not in line:  # the last words of a command that refuses are to be its own
                sys.stderr.buffer.write(line)
                sys.stderr.flush()
        status = running.wait() or int(lost)
        if status and not running.stdin.closed and _states(allocation) == []:
            print(f"error: {_ended(allocation)}", file=sys.stderr, flush=True)
        return 128 - status if status < 0 else status

    def withdraw(self, name: str) -> None:
        """Cancel the jobs, and wait until their commands have ended, but not for the epilog, which may take minutes."""
        super().withdraw(name)
        deadline = time.monotonic() + KILLED_S
        while _states_of(name) and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def holds(self, name: str) -> bool:
        """Whether a job of this user and that name has not ended; the cleaning up of its machines may take minutes."""
        return any(state != "COMPLETING" for state in _states_of(name))

    def cancel(self, name: str) -> None:
        """Cancel this user's jobs of that name."""
        ask("scancel", *_mine(name))


def _mine(name: str) -> tuple[str, str]:
    # By number: $USER may name another user than this process's, and squeue prints nothing for one that it cannot find.
    return f"--user={os.getuid()}", f"--name={name}"


def _states_of(name: str) -> list[str]:
    return ask("squeue", *_mine(name), "--noheader", "--format=%T").split()


def _states(job: str) -> list[tuple[str, str]] | None:
    """State and reason of each component that has not ended; None if Slurm does not answer."""
    try:
        lines = ask("squeue", "--noheader", f"--jobs={job}", "--format=%T|%r").splitlines()
    except SlurmError as error:
        say(str(error))
        return None
    return [(state, reason) for state, _, reason in (line.partition("|") for line in lines)]


def refuse_what_never_starts(
    job: str, reasons: Iterable[str], since: Mapping[str, float], now: float
) -> dict[str, float]:
    """Of a job's reasons those that no other job's end removes, with the time since when it has each.

    `since`: what the last look returned. Raises Refusal once it has had one for HOPELESS_S.
    """
    began = {reason: since.get(reason, now) for reason in reasons if NEVER.fullmatch(reason)}
    if never := sorted(reason for reason, first in began.items() if now - first >= HOPELESS_S):
        raise Refusal(
            f"Slurm would never start the job {job}: {', '.join(never)} (`scontrol show partition` and `sacctmgr show "
            "qos` list the limits); correct pools.slurm in the recipe, such as time_limit, or ask for less"
        )
    return began


def _ended(job: str) -> str:
    """How a job has ended, and what to do."""
    try:
        found = re.findall(r"JobState=(\S+)", ask("scontrol", "show", "job", job))
    except SlurmError:  # Slurm forgets jobs after a few minutes
        found = []
    how = ", ".join(sorted(set(found))) or "its end is not known"
    return (
        f"the Slurm job {job} has ended ({how}): was it cancelled or preempted, or is pools.slurm.time_limit over? "
        "Resume the run with `draftsmith retrain --resume RUN`"
    )


def _print_grant(job: str, request: Request, parts: Components) -> bool:
    """Print what a running job got; False if Slurm does not answer, for which a job that waited long must not end."""
    try:
        grant = _grant(job, request, parts)
    except SlurmError as error:
        say(f"Slurm's job {job} runs, and is asked again which GPUs it has: {error}")
        return False
    print(GRANTED + grant.model_dump_json(), flush=True)
    return True


def _grant(job: str, request: Request, parts: Components) -> Grant:
    granted = {}
    for index, got in enumerate(slurm_job.nodes(ask("scontrol", "--details", "show", "job", job))):
        step = [f"--het-group={index}"] if len(parts) > 1 else []
        granted[parts[index].parts] = slurm_job.assign(parts[index], got, step)
    pools = request.pools if len(parts) > 1 else (request.parts,)
    return Grant(allocation=job, parts=tuple(part for pool in pools for part in granted[pool]))


if __name__ == "__main__":
    run_main(lambda: run_task(SlurmEngine))
