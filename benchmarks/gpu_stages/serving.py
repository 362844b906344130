"""SGLang: captures beside a plain forward, their throughput, two GPUs for one server, a draft in service."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import torch
from agreement import decode
from capture_cost import measure
from prepared import prepared_run
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from gpu_stages.base import AbsentError, Bench, check
from gpu_stages.training import HALF, RECIPE, TRAINED
from models.benchmark.contestants import load_contestants
from models.benchmark.served import serve
from models.capture.sglang.engine import SGLangEngine
from models.data.prompts import heldout_prompts
from models.decoding.acceptance import acceptance_length
from models.dtypes import DTYPES
from models.run import PreparedRun
from models.targets.tiny import trained_tiny

LAYERS = 4
"""Of Qwen3-8B's shape, random: as many as are written and loaded quickly."""
CAPTURE_BAR = 0.9
"""Least share of the prefill throughput that captures must keep; CI's bar on larger batches is higher."""
LENGTH_BAR = 0.05
"""Largest relative difference of served and reference acceptance length."""


@contextmanager
def wide_run(bench: Bench, *overrides: str) -> Iterator[PreparedRun]:
    """A run whose target has few layers of Qwen3-8B's width, and SGLang as its engine."""
    target = bench.work / "wide-target"
    if not (target / "config.json").is_file():
        _write_wide_target(bench, target)
    settings = [
        "target.source=huggingface", f"target.name={target}", "target.aux_layer_ids=[0,1,2]", "generator.engine=sglang",
        "data.max_samples=40", *(HALF if bench.is_gpu else ()), *overrides,
    ]  # fmt: skip
    with prepared_run(bench.work / bench.stage, RECIPE, settings) as run:
        yield run


def _write_wide_target(bench: Bench, folder: Path) -> None:
    hidden, heads, kv_heads, head_dim = bench.pick((4096, 32, 8, 128), (128, 4, 2, 32))
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=32_000, hidden_size=hidden, num_hidden_layers=LAYERS, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_dim, intermediate_size=3 * hidden, max_position_embeddings=8192,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(bench.pick(torch.bfloat16, torch.float32))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(trained_tiny("tiny-llama")).save_pretrained(folder)


def capture(bench: Bench) -> None:
    """The canary, then the throughput of captures beside that of plain prefills, by turns on two servers."""
    rounds, prompts, tokens = bench.pick((5, 128, 1024), (1, 8, 48))
    # Two servers share the GPU.
    with wide_run(bench, "generator.sglang.memory_fraction=0.4") as run:
        found = measure(run, rounds, prompts, tokens)
    bench.note(layers=LAYERS, tokens_per_prompt=tokens, **found)
    share = float(str(found["ratio_median"]))
    check(not bench.is_gpu or share >= CAPTURE_BAR, f"captures keep {share:.0%} of the prefill throughput")


def tensor_parallel(bench: Bench) -> None:
    """One server on two GPUs: its canary, and captures per second."""
    with wide_run(bench, "generator.sglang.tensor_parallel=2") as run, closing(SGLangEngine(run, 0)) as engine:
        transport, samples = run.open_transport(), run.open_samples()
        engine.check_canary(samples[0].tokens[:32])

        def one(index: int) -> int:
            tokens = samples[index].tokens
            transport.delete(engine.capture(f"tensor-parallel/0/{index}/1", tokens).record.key)
            return len(tokens)

        begun = time.perf_counter()
        with ThreadPoolExecutor(engine.in_flight) as threads:
            total = sum(threads.map(one, range(len(samples))))
        bench.note(capture_tokens_per_s=total / (time.perf_counter() - begun))


def served(bench: Bench) -> None:
    """The draft of the stage `training` in SGLang: its steps beside the reference decoder's, and its speed."""
    folder = bench.work / TRAINED
    if not (folder / "export" / "config.json").is_file():
        raise AbsentError("there is no draft: the stage training makes it")
    run = PreparedRun.open(folder)
    config = run.config.benchmark
    result = serve(run)
    if result.acceptance is None or result.length is None:
        raise AbsentError(result.note)
    bench.note(
        served_length=result.length, same_text=result.same_text, conversations=result.acceptance.conversations,
        plain={speed.concurrency: speed.tokens_per_s for speed in result.plain},
        speculative={speed.concurrency: speed.tokens_per_s for speed in result.speculative},
    )  # fmt: skip
    prompts = heldout_prompts(run.open_samples("heldout"), config)
    loaded = load_contestants(Path(run.target.path), [run.folder.export], DTYPES[run.config.benchmark_dtype])
    reference = decode(loaded, prompts, config.lookahead, config.max_new_tokens)
    length = acceptance_length(reference)
    bench.note(
        reference_length=length, apart=result.length / length - 1, served_steps=result.acceptance.steps,
        reference_steps=sum(counts.steps for counts in reference),
    )  # fmt: skip
    check(abs(result.length / length - 1) <= LENGTH_BAR, f"served {result.length:.3f}, reference {length:.3f}")
