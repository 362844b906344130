"""Pools that a Ray cluster places: a placement group is the gang, its bundles are the parts.

The flow itself never imports Ray: its driver would take over the flow's signals.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from infra.config import RayConfig
from infra.pools.queued import GRACE_S
from infra.pools.requests import PREFIX, Grant, Request
from infra.processes.process import module
from infra.refusal import Refusal


@dataclass(frozen=True)
class RayEngine:
    """Ray's three command lines."""

    config: RayConfig

    def __post_init__(self) -> None:
        if find_spec("ray") is None:
            raise Refusal("pools.kind=ray: Ray is not installed: pip install 'draftsmith[ray]'")

    def holder(self, request: Request) -> list[str]:
        """One driver that owns the placement group."""
        growing = ["--autoscaling"] if self.config.autoscaling else []
        return [*self._module("holder"), *growing, "--request", request.model_dump_json()]

    def command(self, grant: Grant, part: int, command: Sequence[str]) -> list[str]:
        """One driver per command, which owns the actor that runs it."""
        place = ["--group", grant.allocation, *grant.parts[part].place, "--grace", str(GRACE_S)]
        return [*self._module("command"), *place, "--", *command]

    def withdrawal(self, owner: str) -> list[str]:
        """Removes the owner's placement group, and with it all that runs in it."""
        return [*self._module("holder"), "--withdraw", PREFIX + owner]

    def _module(self, name: str) -> list[str]:
        return module(f"infra.pools.ray_{name}", "--address", self.config.address)
