"""What capture costs an SGLang server on this machine: prefill throughput with and without it, in one run.

Two servers of the same target stay up; only one works at a time. Rounds alternate between them, and the ratio of each
pair of rounds is taken. Bytes written are compared with the formula: tokens x (K + 1) x H x bytes of the data type.

    python benchmarks/capture_cost.py [--recipe recipes/quickstart.yaml] [--rounds 5] [--prompts 16] [--tokens 256]
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import torch
from prepared import prepared_run

from infra.files.atomic import write_atomically
from infra.processes.exit import run_main
from infra.processes.process import Owner
from infra.provenance import git_sha, hardware
from infra.sglang.client import SGLangClient
from infra.sglang.command import ServerSpec, server_environment, serving_command
from infra.sglang.server import SGLangServer
from models.capture.sglang.engine import SGLangEngine
from models.run import PreparedRun

RESULT = Path(__file__).parent / "results" / "capture_cost.json"
ROOT = Path(__file__).parents[1]


@contextmanager
def plain_server(run: PreparedRun) -> Iterator[SGLangServer]:
    """The same server without capture; without a prefix cache too, or it would not prefill twice."""
    config = run.config.generator
    settings = config.sglang.model_copy(update={"arguments": ("--disable-radix-cache",)})
    spec = ServerSpec(
        Path(run.target.path), config.compute_dtype, run.samples.longest + 1, config.sglang.requests_in_flight
    )
    server = SGLangServer(
        lambda port: serving_command(spec, settings, (), port),
        "sglang-plain",
        Owner(run.folder.name, run.folder.logs),
        server_environment(settings, config.threads),
        settings.start_timeout_s,
    )
    try:
        yield server
    finally:
        server.stop()


def timed(ask: Callable[[torch.Tensor], object], prompts: list[torch.Tensor], in_flight: int) -> float:
    """Prompt tokens per second."""
    begun = time.perf_counter()
    with ThreadPoolExecutor(in_flight) as threads:
        list(threads.map(ask, prompts))
    return sum(map(len, prompts)) / (time.perf_counter() - begun)


def measure(run: PreparedRun, rounds: int, count: int, length: int) -> dict[str, object]:
    in_flight = run.config.generator.sglang.requests_in_flight
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(10, 10_000, (length,), generator=generator) for _ in range(count)]
    transport, written = run.open_transport(), []
    sampling = {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}
    with closing(SGLangEngine(run, 0)) as engine, plain_server(run) as server:
        client = SGLangClient(server, run.config.generator.sglang.request_timeout_s)

        def capture(tokens: torch.Tensor) -> None:
            captured = engine.capture(f"cost/0/{id(tokens)}/1", tokens)
            written.append(captured.record.nbytes)
            transport.delete(captured.record.key)

        def plain(tokens: torch.Tensor) -> None:
            client.generate(tokens.tolist(), sampling)

        engine.check_canary(prompts[0])
        for ask in (capture, plain):
            timed(ask, prompts[: 2 * in_flight], in_flight)
        written.clear()
        pairs = []
        for round_number in range(rounds):
            order = (plain, capture) if round_number % 2 else (capture, plain)
            speeds = {ask: timed(ask, prompts, in_flight) for ask in order}
            pairs.append((speeds[plain], speeds[capture]))
            print(f"round {round_number}: {pairs[-1][0]:.0f} plain, {pairs[-1][1]:.0f} captured tokens/s", flush=True)
    ratios = [captured / plain for plain, captured in pairs]
    return {
        "prefill_tokens_per_s": [round(plain, 1) for plain, _ in pairs],
        "capture_tokens_per_s": [round(captured, 1) for _, captured in pairs],
        "ratio_median": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "bytes_per_sample_written": sorted(set(written)),
        "bytes_per_sample_by_formula": length * run.layout.bytes_per_token,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "quickstart.yaml")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="draftsmith-")))
        name = f"capture-cost-{os.getpid()}"
        run = stack.enter_context(prepared_run(folder / name, options.recipe, ["generator.engine=sglang"]))
        found = measure(run, options.rounds, options.prompts, options.tokens)
        conditions = {
            "commit": git_sha(),
            "date": time.strftime("%Y-%m-%d"),
            "hardware": hardware(),
            "target": run.target.name,
            "dtype": run.config.generator.compute_dtype,
            "stored": run.config.generator.stored_dtype,
            "prompts": options.prompts,
            "tokens_per_prompt": options.tokens,
            "requests_in_flight": run.config.generator.sglang.requests_in_flight,
        }
    write_atomically(options.json, json.dumps(conditions | found, indent=1) + "\n")
    print(f"capture keeps {found['ratio_median']:.1%} of the prefill throughput: {options.json}")


if __name__ == "__main__":
    run_main(main)
