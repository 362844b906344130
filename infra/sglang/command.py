"""The command line of an SGLang server, and the separate Python environment that it runs in."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from infra.network.ports import HOST
from infra.processes.control_groups import cores
from infra.records.servers import ServerMachines
from infra.refusal import Refusal
from infra.settings import leased_gpus, server_machines, sglang_environment
from infra.sglang.config import SGLangConfig

MISTRALS_OWN = ("mistral-large-3", "mistral-small-4", "leanstral")
CPU_MEMORY_FRACTION = 0.5
CPU_KV_TOKENS = 4096
CPU_KV_REQUESTS = 8
"""Longest requests that the KV cache holds on the CPU; others wait in the server's queue."""


def sglang_python() -> Path:
    """SGLang's Python. Raises Refusal, with the remedy, where SGLang or our distribution is missing."""
    folder = sglang_environment()
    for wanted in ("sglang", "draftsmith"):
        if not any(folder.glob(f"lib/python3*/site-packages/{wanted}-*.dist-info")):
            raise Refusal(
                f"generator.engine=sglang: there is no {wanted} in {folder}. `make sglang` sets it up "
                "($DRAFTSMITH_SGLANG names another place), or set generator.engine=transformers"
            )
    return folder / "bin" / "python"


def sglang_version() -> str:
    """Version of SGLang in its environment. Raises Refusal, with the remedy, if it is missing."""
    packages = sglang_python().parents[1].glob("lib/python3*/site-packages/sglang-*.dist-info")
    return next(packages).name.removeprefix("sglang-").removesuffix(".dist-info")


@dataclass(frozen=True)
class ServerSpec:
    """What a server serves, and on what."""

    target: Path
    dtype: str
    longest: int
    """Tokens of the longest request, its answer included."""
    in_flight: int
    """Concurrent requests."""
    python: Path = field(default_factory=sglang_python)
    """Interpreter of SGLang's environment; raises Refusal without one."""
    gpus: int = field(default_factory=lambda: len(leased_gpus()))
    """On each of its machines; 0 runs on the CPU."""
    machines: ServerMachines | None = field(default_factory=server_machines)
    """Over which it extends; None: this one alone."""


def capture_command(
    spec: ServerSpec, config: SGLangConfig, aux_layer_ids: Sequence[int], port: int, answers: bool = False
) -> list[str]:
    """A server that captures `aux_layer_ids` and the output after the final norm of all that it computes.

    `answers`: it also writes answers, and does not only prefill. SGLang keeps the output after the final norm only
    beside a layer's: of no layers the first one is named, and the plugin leaves it out.
    """
    return [
        *_server(spec, config, port),
        "--enable-return-aux-hidden-states",
        # Only names the convention of the layer ids here: no draft is loaded.
        *("--speculative-algorithm", "EAGLE3"),
        # The engine's defaults differ by architecture.
        *("--return-aux-hidden-state-layer-ids", *map(str, aux_layer_ids or (0,))),
        # A prefix that comes from the cache is not computed, so it has no hidden states.
        "--disable-radix-cache",
        # A replayed graph writes to buffers of its own; steps of answers, which it speeds up, are copied before.
        "--disable-prefill-cuda-graph",
        *(() if answers else ("--disable-decode-cuda-graph",)),
        # An idle scheduler would otherwise spin, and keep Python's lock from the thread that writes. With data-parallel
        # attention every group takes part in each pass, and one without requests of its own would sleep up to a second
        # before it does (SGLang 0.5.23).
        *(("--sleep-on-idle",) if config.attention_data_parallel == 1 else ()),
        *config.arguments,
    ]


def serving_command(spec: ServerSpec, config: SGLangConfig, speculation: Sequence[str], port: int) -> list[str]:
    """Command line of a server that generates; `speculation` holds the draft's arguments, if there is one."""
    return [*_server(spec, config, port), *speculation, *config.arguments]


def draft_arguments(place: Path) -> tuple[str, ...]:
    """SGLang's arguments for the place of an export.

    Raises Refusal for a path by whose words SGLang (0.5.23, utils/hf_transformers/mistral_utils.py) takes any draft for
    one in Mistral's own format, which has no config.json; it then does not start.
    """
    path = str(place).lower()
    if ("eagle" in path and "mistral" in path) or any(name in path for name in MISTRALS_OWN):
        raise Refusal(
            f"SGLang does not start with a draft in {place}: it takes paths with `eagle` and `mistral`, or with "
            f"{', '.join(MISTRALS_OWN)}, for drafts in Mistral's own format; choose another name (`name`, "
            "`tracking.registered_model`) or folder"
        )
    return ("--speculative-draft-model-path", str(place))


def _server(spec: ServerSpec, config: SGLangConfig, port: int) -> list[str]:
    command = [str(spec.python), "-m", "sglang.launch_server", "--model-path", str(spec.target)]
    command += ["--host", HOST, "--port", str(port), "--dtype", spec.dtype]
    # Prompts come as token ids; the first request is ours, and says more than the server's own warm-up.
    command += ["--skip-tokenizer-init", "--skip-server-warmup"]
    command += ["--log-level", "info", "--log-level-http", "warning"]
    # A step that compiles kernels is no hanging one; those end by our own timeouts.
    command += ["--watchdog-timeout", str(math.ceil(config.start_timeout_s))]
    machines, groups = spec.machines.count if spec.machines else 1, config.attention_data_parallel
    ranks = config.tensor_parallel or max(1, spec.gpus * machines // config.data_parallel)
    command += ["--tensor-parallel-size", str(ranks)]
    command += ["--max-running-requests", str(max(spec.in_flight, config.data_parallel, groups))]
    if groups > 1:
        # Else the head is divided over ranks with different requests, and nobody knows the target's top token.
        command += ["--attn-dp-size", str(groups), "--enable-dp-lm-head"]
    optional = {
        "--data-parallel-size": config.data_parallel if config.data_parallel > 1 else None,
        "--expert-parallel-size": config.expert_parallel,
        "--quantization": config.quantization,
        "--mem-fraction-static": config.memory_fraction,
        "--context-length": config.context_length,
        "--chunked-prefill-size": config.chunked_prefill_tokens,
        "--attention-backend": config.attention_backend,
    }
    if spec.gpus == 0:
        optional |= _cpu_options(spec, config)
    return command + [part for name, value in optional.items() if value is not None for part in (name, str(value))]


def _cpu_options(spec: ServerSpec, config: SGLangConfig) -> dict[str, object]:
    """What SGLang cannot work out without a GPU."""
    return {
        "--device": "cpu",
        "--sampling-backend": "pytorch",
        "--grammar-backend": "none",
        "--mem-fraction-static": config.memory_fraction or CPU_MEMORY_FRACTION,
        "--max-total-tokens": max(CPU_KV_TOKENS, CPU_KV_REQUESTS * spec.longest),
        "--chunked-prefill-size": config.chunked_prefill_tokens or -1,
    }


def server_environment(config: SGLangConfig, threads: int | None, servers: int = 1) -> dict[str, str]:
    """Variables to add for a server on the CPU; `servers` share this process's cores, unless `threads` are given.

    So do several ranks of a server: left to itself SGLang wants a NUMA node for each.
    """
    if leased_gpus():
        return {}
    environment = {"OMP_NUM_THREADS": str(threads or max(1, cores() // servers))}
    ranks = (config.tensor_parallel or 1) * config.data_parallel
    if ranks > 1:
        seen = sorted(os.sched_getaffinity(0))
        shares = [seen[rank::ranks] or [seen[rank % len(seen)]] for rank in range(ranks)]
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, share)) for share in shares)
    return environment
