"""Holds a Slurm job for as long as this process lives. One process per lease.

`python -m infra.pools.slurm_holder --config JSON --request JSON` submits the job, prints why it waits, then `granted
JSON`, and ends with an error when the job ends. `--withdraw NAME` cancels a run's jobs.
"""

import argparse
import getpass
import signal
import subprocess
import threading
import time

from infra.config import SlurmConfig
from infra.pools import slurm_job
from infra.pools.queued import GRANTED, say
from infra.pools.requests import Grant, Machine, Request
from infra.processes.exit import run_main
from infra.refusal import Refusal
from infra.settings import slurm_environment

POLL_S = 1.0
HELD_S = 10.0
ANSWER_S = 60.0
"""Timeout of slurmctld, which may be busy."""
CANCELLED_S = 60.0


class SlurmError(Exception):
    """A command of Slurm's failed; the message is its own."""


def ask(*command: str, text: str | None = None) -> str:
    """What a command of Slurm's prints. Raises SlurmError."""
    options = {"input": text, "capture_output": True, "text": True, "timeout": ANSWER_S, "env": slurm_environment()}
    try:
        done = subprocess.run(command, check=False, **options)
    except subprocess.TimeoutExpired as error:
        raise SlurmError(f"{command[0]} had no answer within {ANSWER_S:g} s") from error
    if done.returncode:
        raise SlurmError(done.stderr.strip())
    return done.stdout


def machines(partition: str | None) -> list[Machine]:
    """Total resources of the partition's machines, or of all partitions if none is named."""
    chosen = [f"--partition={partition}"] if partition else []
    return slurm_job.machines(ask("sinfo", "--Node", "--noheader", "--format=%N|%c|%G", *chosen))


def submit(request: Request, parts: tuple[slurm_job.Component, ...], config: SlurmConfig) -> str:
    """Put the job into the queue; return its id. Raises Refusal, with Slurm's reason, where Slurm refuses it."""
    try:
        return ask("sbatch", "--parsable", text=slurm_job.script(request, parts, config)).strip().split(";")[0]
    except SlurmError as error:
        raise Refusal(f"Slurm refuses the job: {error}; see pools.slurm in the recipe") from error


def hold(request: Request, config: SlurmConfig) -> None:
    """Ask, say what was granted, and keep it until the job ends or this process is stopped."""
    parts = slurm_job.components(request, machines(config.partition))
    alive = slurm_job.alive_file(request)
    alive.touch()
    while jobs(request.name):
        say(f"a job {request.name} is there already: it ends, or somebody releases it")
        time.sleep(POLL_S)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    job = submit(request, parts, config)
    try:
        granted = False
        while not stop.wait(HELD_S if granted else POLL_S):
            alive.touch()
            states = _states(job)
            if states is None:
                continue  # slurmctld is restarting; jobs keep running meanwhile
            if not states:
                raise Refusal(f"the Slurm job {job} has ended: was it cancelled, or is pools.slurm.time_limit over?")
            if not granted and set(states) == {"RUNNING"}:
                granted = True
                print(GRANTED + _grant(job, request, parts).model_dump_json(), flush=True)
            elif not granted:
                say(f"Slurm's job {job} waits: {', '.join(sorted(set(states.values())))}")
    finally:
        cancel(request.name)


def _states(job: str) -> dict[str, str] | None:
    """The states of running components, with a reason; None if Slurm does not answer."""
    try:
        lines = ask("squeue", "--noheader", f"--jobs={job}", "--format=%T|%r").splitlines()
    except SlurmError as error:
        say(str(error))
        return None
    return {state: reason for state, _, reason in (line.partition("|") for line in lines)}


def _grant(job: str, request: Request, parts: tuple[slurm_job.Component, ...]) -> Grant:
    granted = {}
    for index, got in enumerate(slurm_job.nodes(ask("scontrol", "--details", "show", "job", job))):
        step = ["--het-group", str(index)] if len(parts) > 1 else []
        granted[parts[index].parts] = slurm_job.assign(parts[index], got, step)
    pools = request.pools if len(parts) > 1 else (request.parts,)
    return Grant(allocation=job, parts=tuple(part for pool in pools for part in granted[pool]))


def jobs(name: str) -> list[str]:
    """This user's jobs of that name that have not ended."""
    mine = ("--noheader", f"--user={getpass.getuser()}", f"--name={name}", "--format=%i")
    return ask("squeue", *mine).split()


def cancel(name: str) -> None:
    """Cancel this user's jobs of that name, and wait until they are gone. Raises TimeoutError."""
    deadline = time.monotonic() + CANCELLED_S
    while jobs(name):
        ask("scancel", f"--user={getpass.getuser()}", f"--name={name}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"Slurm did not cancel {name} within {CANCELLED_S:g} s")
        time.sleep(0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=SlurmConfig.model_validate_json)
    task = parser.add_mutually_exclusive_group(required=True)
    task.add_argument("--request", type=Request.model_validate_json)
    task.add_argument("--withdraw")
    options = parser.parse_args()
    if options.withdraw:
        cancel(options.withdraw)
    else:
        hold(options.request, options.config)


if __name__ == "__main__":
    run_main(main)
