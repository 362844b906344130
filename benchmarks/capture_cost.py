"""What capture costs an SGLang server on this machine: prefill throughput with and without it, in one run.

Two servers of the same target stay up; only one works at a time. Rounds alternate between them, and the ratio of each
pair of rounds is taken. The target has random weights, the width of an 8B model and few layers, so that there is as
much to capture and little to compute. How long the hook keeps `run_batch` from returning is measured inside the
server (tests/sglang_cpu). The writer's thread runs on the cores that compute the prefill, which a GPU spares. Both
servers prefill equally often, so their CPU seconds tell its share where other programs disturb the rounds.

    python benchmarks/capture_cost.py [--rounds 4] [--prompts 2] [--tokens 8192] [--hidden 4096] [--layers 4]
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

import psutil
import torch
from machine import cpu_model
from prepared import prepared_run
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from infra.files.atomic import write_atomically
from infra.processes.exit import run_main
from infra.processes.process import Owner
from infra.processes.supervisor import descendants
from infra.provenance import git_sha, hardware
from infra.refusal import Refusal
from infra.sglang.client import SGLangClient
from infra.sglang.command import ServerSpec, server_environment, serving_command
from infra.sglang.server import SGLangServer
from models.capture.sglang.engine import SGLangEngine
from models.config.recipe import load_recipe
from models.run import PreparedRun
from models.targets.prepare import prepare_target

RESULT = Path(__file__).parent / "results" / "capture_cost.json"
RECIPE = Path(__file__).parents[1] / "recipes" / "tiny.yaml"
BATCH = 8192
"""Tokens of a prefill: SGLang's own chunk size on an 80 GB GPU."""


def make_target(folder: Path, hidden: int, layers: int) -> None:
    """A Llama with random weights."""
    torch.manual_seed(0)
    heads = hidden // 128
    config = LlamaConfig(
        vocab_size=1024, hidden_size=hidden, intermediate_size=hidden // 2, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=max(1, heads // 4), max_position_embeddings=2 * BATCH,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    tiny = prepare_target(load_recipe(RECIPE).target)
    AutoTokenizer.from_pretrained(tiny.path).save_pretrained(folder)


def timing(file: Path) -> dict[str, str]:
    """Has a server write tokens, seconds, and seconds in our hook of every prefill to `file`."""
    return {"DRAFTSMITH_TEST_FAULT": f"timed:0:{file}"}


def batches(file: Path) -> list[tuple[float, ...]]:
    """Prefills of a whole batch; none without the tests' equipment in SGLang's environment, which times them."""
    if not file.exists():
        return []
    lines = [tuple(map(float, line.split())) for line in file.read_text().splitlines()]
    return [line for line in lines if line[0] == BATCH]


def scheduler_cpu_s(server: SGLangServer) -> float:
    """CPU seconds of a server's busiest process since its start, which other programs on the machine do not change."""
    processes = [psutil.Process(pid).cpu_times() for pid in descendants(server.process.pid)]
    return round(max(times.user + times.system for times in processes), 1)


class TimedEngine(SGLangEngine):
    def _environment(self) -> dict[str, str]:
        return super()._environment() | timing(self.run.folder.path / "captured.times")


@contextmanager
def plain_server(run: PreparedRun) -> Iterator[SGLangServer]:
    """The same server without capture; without a prefix cache too, or it would not prefill twice."""
    config = run.config.generator
    arguments = (*config.sglang.arguments, "--disable-radix-cache", "--sleep-on-idle")
    settings = config.sglang.model_copy(update={"arguments": arguments})
    spec = ServerSpec(
        Path(run.target.path), run.config.capture_dtype, run.samples.longest + 1, config.sglang.requests_in_flight
    )
    server = SGLangServer(
        lambda port: serving_command(spec, settings, (), port),
        "sglang-plain",
        Owner(run.folder.name, run.folder.logs),
        server_environment(settings, config.threads) | timing(run.folder.path / "plain.times"),
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
    prompts = [torch.randint(10, 1_000, (length,), generator=generator) for _ in range(count)]
    transport, written = run.open_transport(), []
    sampling = {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}
    with closing(TimedEngine(run, 0)) as engine, plain_server(run) as server:
        client = SGLangClient(server, run.config.generator.sglang.request_timeout_s)

        def capture(tokens: torch.Tensor) -> None:
            captured = engine.capture(f"cost/0/{id(tokens)}/1", tokens)
            written.append(captured.record.nbytes)
            transport.delete(captured.record.key)

        def plain(tokens: torch.Tensor) -> None:
            client.generate(tokens.tolist(), sampling)

        engine.check_canary(prompts[0][:64])
        for ask in (capture, plain):
            timed(ask, prompts[:in_flight], in_flight)
        written.clear()
        pairs = []
        for round_number in range(rounds):
            order = (plain, capture) if round_number % 2 else (capture, plain)
            speeds = {ask: timed(ask, prompts, in_flight) for ask in order}
            pairs.append((speeds[plain], speeds[capture]))
            print(f"round {round_number}: {pairs[-1][0]:.0f} plain, {pairs[-1][1]:.0f} captured tokens/s", flush=True)
        cpu_s = {"capture": scheduler_cpu_s(engine.server), "plain": scheduler_cpu_s(server)}
        transport.close()
    ratios = [captured / plain for plain, captured in pairs]
    return {
        "prefill_tokens_per_s": [round(plain, 1) for plain, _ in pairs],
        "capture_tokens_per_s": [round(captured, 1) for _, captured in pairs],
        "ratio_median": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "scheduler_cpu_s": cpu_s,
        "load_average": os.getloadavg(),
        "bytes_per_sample_written": sorted(set(written)),
        "bytes_per_sample_by_formula": length * run.layout.bytes_per_token,
        **batch_figures(run.folder.path),
    }


def batch_figures(folder: Path) -> dict[str, object]:
    """What whole batches took, and for how long capture kept the scheduler; empty where there were none."""
    captured, plainly = (batches(folder / f"{name}.times") for name in ("captured", "plain"))
    if not captured or not plainly:
        return {}
    return {
        "batches_of_8192_tokens": len(captured),
        "batch_s_median": round(statistics.median(seconds for _, seconds, _ in captured), 3),
        "batch_without_capture_s_median": round(statistics.median(seconds for _, seconds, _ in plainly), 3),
        "blocked_ms_median": round(1e3 * statistics.median(hook for *_, hook in captured), 2),
        "blocked_ms_worst": round(1e3 * max(hook for *_, hook in captured), 2),
        "blocked_share_of_prefill": round(sum(h for *_, h in captured) / sum(s for _, s, _ in captured), 5),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=BATCH)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="draftsmith-")))
        make_target(folder / "target", options.hidden, options.layers)
        settings = [
            "generator.engine=sglang", "generator.compute_dtype=bfloat16", "generator.stored_dtype=bfloat16",
            "generator.threads=null", f"target.name={folder / 'target'}", "target.source=huggingface",
            "transport.budget_mib=1024",
            f'generator.sglang.arguments=["--max-prefill-tokens", "{BATCH}", "--max-total-tokens", "{4 * BATCH}"]',
        ]  # fmt: skip
        run = stack.enter_context(prepared_run(folder / f"capture-cost-{os.getpid()}", RECIPE, settings))
        found = measure(run, options.rounds, options.prompts, options.tokens)
        if "blocked_share_of_prefill" not in found:
            raise Refusal(
                f"no prefill of {BATCH} tokens was timed: run `make .venv-sglang/.test-ready`, or more prompts"
            )
        conditions = {
            "commit": git_sha(),
            "date": time.strftime("%Y-%m-%d"),
            "hardware": hardware(),
            "cpu": cpu_model(),
            "target": f"random Llama, hidden {options.hidden}, {options.layers} layers",
            "dtype": run.config.capture_dtype,
            "stored": run.config.generator.stored_dtype,
            "prompts": options.prompts,
            "tokens_per_prompt": options.tokens,
            "requests_in_flight": run.config.generator.sglang.requests_in_flight,
            "threads": os.environ.get("OMP_NUM_THREADS"),
        }
    write_atomically(options.json, json.dumps(conditions | found, indent=1) + "\n")
    print(
        f"capture keeps {found['ratio_median']:.1%} of the prefill throughput, and its hook blocks for "
        f"{found['blocked_share_of_prefill']:.2%} of the prefill: {options.json}"
    )


if __name__ == "__main__":
    run_main(main)
