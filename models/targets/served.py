"""Command line and environment of an SGLang server for a target."""

from pathlib import Path

from infra.pools.local import cores
from infra.settings import leased_gpus
from infra.sglang.command import ServerSpec, on_cpu
from infra.sglang.environment import sglang_python
from models.config.generator import GeneratorConfig


def server_spec(target: Path, dtype: str, longest: int, in_flight: int) -> ServerSpec:
    """The server's specification. Raises Refusal if SGLang is missing.

    `longest`: tokens of the longest request including its answer; `in_flight`: concurrent requests.
    """
    return ServerSpec(
        python=sglang_python(),
        target=target,
        dtype=dtype,
        gpus=len(leased_gpus()),
        longest=longest,
        in_flight=in_flight,
    )


def server_environment(config: GeneratorConfig, servers: int) -> dict[str, str]:
    """Variables to add for the server; `servers`: number of servers that share this machine's cores."""
    return {} if leased_gpus() else on_cpu(config.sglang, config.threads or max(1, cores() // servers))
