"""A target behind an SGLang server: what the server's command line and environment need. Used by whoever starts one."""

from pathlib import Path

from infra.pools.local import cores
from infra.settings import leased_gpus
from infra.sglang.command import ServerSpec, on_cpu
from infra.sglang.environment import sglang_python
from models.config.generator import GeneratorConfig


def server_spec(target: Path, dtype: str, longest: int, in_flight: int) -> ServerSpec:
    """`longest`: tokens of the longest request, its answer included; `in_flight`: requests at a time.

    Raises Refusal where SGLang is missing.
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
    """Beside what SGLang finds by itself; `servers`: how many share this machine's cores."""
    return {} if leased_gpus() else on_cpu(config.sglang, config.threads or max(1, cores() // servers))
