"""Optimizer steps of Qwen3-8B's draft on one long sample: seconds, share of the peak, memory beside the planner's."""

from dataclasses import replace

import torch
from draft_contestants import SHAPES, Shape
from max_length import measure, model_flops, share_of_peak

from gpu_stages.base import Bench, check
from infra.planner.memory import Setting, longest_sample, rank_memory
from infra.planner.shapes import TargetShape
from models.config.eagle3 import Eagle3Config

LENGTHS = (4096, 16_384, 65_536, 131_072)
STEPS = 4
PEAK_BAR = 0.15
"""Largest relative difference of the measured peak and the planner's."""


def max_lengths(bench: Bench) -> None:
    """Every length that the planner expects to fit must fit, with the peak that it expects."""
    shape = replace(SHAPES[bench.pick("qwen3-8b", "tiny")], steps=STEPS)
    bench.note(shape=bench.pick("qwen3-8b", "tiny"), ttt_steps=STEPS)
    failures = []
    for length in bench.pick(LENGTHS, (32, 64)):
        at = replace(shape, lengths=(length,))
        planned, fits = predicted(at, bench)
        found = measure(at, bench.device, True, bench.pick(2, 1))
        bench.note(**{f"tokens_{length}": _row(at, found, planned)})
        if found is None:
            failures += [f"{length} tokens do not fit, the planner says {planned / 2**30:.1f} GiB"] if fits else []
            break
        if found["peak_bytes"] and abs(found["peak_bytes"] / planned - 1) > PEAK_BAR:
            failures.append(f"{length} tokens peak at {found['peak_bytes'] / 2**30:.1f}, not {planned / 2**30:.1f} GiB")
    check(not failures, "; ".join(failures))


def _row(shape: Shape, found: dict | None, planned: int) -> dict:
    row = {"fits": found is not None, "planned_bytes": planned}
    if found is None:
        return row
    seconds = found["seconds"]
    return row | {
        "seconds": seconds,
        "peak_bytes": found["peak_bytes"],
        "peak_to_planned": found["peak_bytes"] and found["peak_bytes"] / planned,
        "tflops_per_s": model_flops(shape) / seconds / 1e12,
        "mfu": share_of_peak(shape, seconds),
    }


def predicted(shape: Shape, bench: Bench) -> tuple[int, bool]:
    """Bytes of what `measure` does: no averages, no prefetched samples; and whether this GPU has as many."""
    target = TargetShape(
        hidden_size=shape.hidden, num_layers=1, vocab_size=shape.vocabulary, parameters=1, active_parameters=1,
        attention_width=1,
    )  # fmt: skip
    draft = Eagle3Config(
        vocab_size=None if shape.draft_vocabulary == shape.vocabulary else shape.draft_vocabulary,
        num_heads=shape.heads, num_kv_heads=shape.kv_heads, head_dim=shape.head_dim,
        intermediate_size=shape.intermediate, ttt_steps=shape.steps,
    )  # fmt: skip
    precision = bench.pick("bfloat16", "float32")
    setting = Setting(
        aux_count=3, stored=precision, precision=precision, top_token=False, whole_head=False,
        recompute=True, prefetch_steps=-1, one_memory=not bench.is_gpu,
    )  # fmt: skip
    planned = rank_memory(draft.shape(target, 3, precision), target, setting, shape.lengths).total
    if not bench.is_gpu:
        return planned, True
    memory = torch.cuda.get_device_properties(0).total_memory
    return planned, shape.tokens <= longest_sample(draft.shape(target, 3, precision), target, setting, memory)
