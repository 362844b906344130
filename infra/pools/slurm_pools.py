"""Pools that are a Slurm job: its components are the gang, every command is a step in it."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from infra.config import PoolsConfig, SlurmConfig
from infra.pools.base import PoolSpec
from infra.pools.queued import GRACE_S
from infra.pools.requests import PREFIX, Grant, Request, divide
from infra.pools.slurm_holder import SlurmError, machines
from infra.pools.slurm_job import components, components_apart, script
from infra.processes.process import module
from infra.refusal import Refusal


def dry_run(name: str, specs: Sequence[PoolSpec], config: PoolsConfig) -> str:
    """The job's script for a run of that recipe; where no Slurm answers, as for machines too small for both pools.

    Raises Refusal, with the numbers, for what can never fit.
    """
    request = Request(owner=f"{name}-TIME", folder=f"runs/{name}-TIME/logs", pools=divide(specs, config))
    try:
        parts = components(request, machines(config.slurm.partition))
    except (SlurmError, FileNotFoundError):
        parts = components_apart(request)
    return script(request, parts, config.slurm)


@dataclass(frozen=True)
class SlurmEngine:
    """Slurm's three command lines."""

    config: SlurmConfig

    def __post_init__(self) -> None:
        if shutil.which("sbatch") is None:
            raise Refusal(
                "pools.kind=slurm: there is no sbatch on this machine: start the run on a machine from which jobs are "
                "submitted (Debian: apt install slurm-client)"
            )

    def holder(self, request: Request) -> list[str]:
        """Who submits the job, says that the run lives, and cancels the job."""
        config = ["--config", self.config.model_dump_json()]
        return [*module("infra.pools.slurm_holder"), *config, "--request", request.model_dump_json()]

    def command(self, grant: Grant, part: int, command: Sequence[str]) -> list[str]:
        """Who starts a step and drives it."""
        place = ["--job", grant.allocation, *grant.parts[part].place, "--grace", str(GRACE_S)]
        return [*module("infra.pools.slurm_command"), *place, "--", *command]

    def withdrawal(self, owner: str) -> list[str]:
        """Cancels the owner's jobs."""
        return module("infra.pools.slurm_holder", "--withdraw", PREFIX + owner)
