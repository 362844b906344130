"""Runs a command as a step of a Slurm job and drives it from here. One process per command.

`python -m infra.pools.slurm_command --job J [--het-group I] --node N --cores C --gpus G [--mine 1,2] --grace S --
COMMAND` prints what the command prints and ends with its status. The command runs under our supervisor, whose pipe from
its starter is srun's standard input, held open here: SIGTERM closes it. When this process dies, so does srun, and Slurm
ends the step.
"""

import argparse
import signal
import subprocess
import sys
from pathlib import Path

from infra.processes import supervisor
from infra.settings import slurm_environment

TOGETHER = 'exec "$@" 2>&1'
"""So that all that srun prints to its own standard error is srun's."""
CHOOSE = 'CUDA_VISIBLE_DEVICES=$(echo "$CUDA_VISIBLE_DEVICES" | cut -d , -f "$0") exec "$@" 2>&1'
"""A step sees what its component has on the machine; its part of that is told by position, whatever Slurm numbers."""

EXIT_NOTICE = b": task 0: "
LOST = b"Node failure"
"""srun prints this when a machine is lost, and still exits as if the step had succeeded."""


def srun(options: argparse.Namespace) -> list[str]:
    """The step's command line."""
    step = ["srun", f"--jobid={options.job}", "--overlap", "--export=ALL", "--unbuffered", "--quiet"]
    step += ["--nodes=1", "--ntasks=1", f"--nodelist={options.node}", f"--cpus-per-task={options.cores}"]
    if options.het_group is not None:
        step.append(f"--het-group={options.het_group}")
    step.append(f"--gres=gpu:{options.gpus}" if options.mine else "--gres=none")
    guard = [sys.executable, "-I", "-S", str(Path(supervisor.__file__)), "--grace", str(options.grace), "--"]
    begin = ["sh", "-c", CHOOSE, options.mine] if options.mine else ["sh", "-c", TOGETHER, "sh"]
    return [*step, *guard, *begin, *options.command]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", required=True)
    parser.add_argument("--het-group", type=int)
    parser.add_argument("--node", required=True)
    parser.add_argument("--cores", type=int, required=True)
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--mine")
    parser.add_argument("--grace", type=float, required=True)
    parser.add_argument("command", nargs="+")
    # In a group of its own: the signal that ends this process would have srun kill the step at once.
    step = subprocess.Popen(
        srun(parser.parse_args()),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=slurm_environment(),
        process_group=0,
    )
    assert step.stdin is not None
    assert step.stderr is not None
    signal.signal(signal.SIGTERM, lambda *_: step.stdin and step.stdin.close())
    lost = False
    for line in step.stderr:
        lost = lost or LOST in line
        if EXIT_NOTICE not in line:  # the last words of a command that refuses are to be its own
            sys.stderr.buffer.write(line)
            sys.stderr.flush()
    status = step.wait() or int(lost)
    return 128 - status if status < 0 else status


if __name__ == "__main__":
    sys.exit(main())
