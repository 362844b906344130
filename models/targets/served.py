"""The target of a run behind an SGLang server: what the server's command line and environment need. Used by whoever
starts one.
"""

from pathlib import Path

from infra.pools.local import cores
from infra.settings import leased_gpus, sglang_environment
from infra.sglang.command import ServerSpec, on_cpu
from models.run import Run


def server_spec(run: Run, dtype: str, longest: int, in_flight: int) -> ServerSpec:
    """`longest`: tokens of the longest request, its answer included; `in_flight`: requests at a time."""
    return ServerSpec(
        python=sglang_environment() / "bin" / "python",
        target=Path(run.target.path),
        dtype=dtype,
        gpus=len(leased_gpus()),
        longest=longest,
        in_flight=in_flight,
    )


def server_environment(run: Run, servers: int) -> dict[str, str]:
    """Beside what SGLang finds by itself; `servers`: how many share this machine's cores."""
    if leased_gpus():
        return {}
    config = run.config.generator
    return on_cpu(config.sglang, config.threads or max(1, cores() // servers))
