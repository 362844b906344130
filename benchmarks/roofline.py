"""A draft step's predicted time on a GPU, from a trace of its operations; no GPU is needed.

    python benchmarks/roofline.py [--shapes recipe short] [--json benchmarks/results/roofline.json]

A whole EAGLE-3 training step (forward, backward, clipping, AdamW, moving average) runs on the tests' emulated
accelerator without values, so that every operation is seen with its shapes and dtypes. An operation takes as long as
its arithmetic or its memory traffic, whichever is longer, at the shares of the peak in `Hardware`; launches, gaps and
host waits cost nothing, so every figure is a prediction of what is possible, not a measurement. Matrix products are
told from attention and from everything else ("element-wise").

How operations are counted is said in operation_trace.py. Every position is supervised and lies in the draft vocabulary.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from draft_contestants import AUX_LAYERS
from operation_trace import DEVICE, Hardware, Trace, emulated_device

from infra.files.atomic import write_atomically
from infra.planner.memory import Setting, rank_memory
from infra.planner.shapes import Precision, TargetShape
from infra.provenance import git_sha
from models.config.eagle3 import Eagle3Config
from models.config.training import TrainingConfig
from models.drafts.base import PackedSamples, TargetProjection
from models.drafts.eagle3 import attention
from models.drafts.eagle3.module import Eagle3Draft
from models.drafts.vocabulary import DraftVocabulary
from models.dtypes import DTYPES
from models.fused import FusedFunction
from models.losses import chunked
from models.training.lightning_module import DraftModule
from models.training.stream import MicroBatch

RESULT = Path(__file__).parent / "results" / "roofline.json"


@dataclass(frozen=True)
class Step:
    """One rank's optimizer step of one micro-batch."""

    hidden: int = 4096
    vocabulary: int = 151_936
    draft_vocabulary: int = 32_000
    intermediate: int = 12_288
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    ttt_steps: int = 7
    lengths: tuple[int, ...] = (1500,) * 4
    precision: Precision = "bfloat16"
    chunk_tokens: int | None = None
    recompute: bool = False

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def config(self) -> Eagle3Config:
        return Eagle3Config(
            vocab_size=self.draft_vocabulary, num_heads=self.heads, num_kv_heads=self.kv_heads, head_dim=self.head_dim,
            intermediate_size=self.intermediate, ttt_steps=self.ttt_steps,
        )  # fmt: skip

    def planned_bytes(self) -> int:
        """The planner's peak of a GPU that trains this."""
        target = TargetShape(
            hidden_size=self.hidden, num_layers=1, vocab_size=self.vocabulary, parameters=1, active_parameters=1,
            attention_width=1,
        )  # fmt: skip
        setting = Setting(
            aux_count=len(AUX_LAYERS), stored="bfloat16", precision=self.precision, top_token=True,
            whole_head=False, chunk_tokens=self.chunk_tokens, prefetch_steps=0, one_memory=False,
            recompute=self.recompute,
        )  # fmt: skip
        draft = self.config.shape(target, len(AUX_LAYERS), self.precision)
        return rank_memory(draft, target, setting, self.lengths).total


SHAPES = {
    "four": Step(),
    "short": Step(lengths=(550,)),
    "long": Step(lengths=(4096,)),
    "128k": Step(lengths=(131_072,), ttt_steps=4, recompute=True),
}
"""A draft of Qwen3-8B: four samples of 1,500 tokens, one chat, one long sample, and one that needs 80 GB."""


def trace_step(step: Step) -> Trace:
    """One optimizer step; the last one's gradients, the optimizer's state and the moving average are there."""
    draft = _draft(step)
    with emulated_device(without_values=True), Trace(step.lengths, Hardware()) as trace, _as_on_cuda(trace):
        # The next micro-batch waits on the device.
        module, batch, _next = _module(step, draft), _batch(step), _batch(step)
        optimizer = module.configure_optimizers()["optimizer"]
        for group in optimizer.param_groups:
            for p in group["params"]:
                state = {name: torch.empty_like(p) for name in ("exp_avg", "exp_avg_sq")}
                p.grad = torch.empty_like(p)
                optimizer.state[p] = state | {"step": torch.zeros((), device=DEVICE)}
        trace.by_kind.clear()
        trace.by_operation.clear()
        trace.waits.clear()
        with trace.phase("forward"), torch.autocast(DEVICE.type, torch.bfloat16, step.precision == "bfloat16"):
            loss = module.training_step(batch, 0)
        module.outcome = None
        with trace.phase("backward"):
            optimizer.zero_grad()
            loss.backward()
        with trace.phase("optimizer"):
            module.configure_gradient_clipping(optimizer)
            optimizer.step()
            module.average(100)
        return trace


@contextmanager
def _as_on_cuda(trace: Trace) -> Iterator[None]:
    """What the code decides by the device's type."""

    def call(function: FusedFunction, *args: Any) -> Any:
        return trace.call_fused(function, *args)

    with (
        patch.dict(chunked.BLOCK_BYTES, {DEVICE.type: chunked.BLOCK_BYTES["cuda"]}),
        patch.object(FusedFunction, "__call__", call),
        patch.object(chunked, "compiles", lambda _device: True),
        patch.object(attention, "compiles", lambda _device: True),
    ):
        yield


def _draft(step: Step) -> Eagle3Draft:
    vocabulary = DraftVocabulary(torch.arange(step.draft_vocabulary), step.vocabulary)
    with torch.device("meta"):
        draft = Eagle3Draft(step.config, torch.empty(step.vocabulary, step.hidden), vocabulary, AUX_LAYERS)
    draft.hold_embeddings(DTYPES[step.precision])
    return draft


def _module(step: Step, draft: Eagle3Draft) -> DraftModule:
    """The draft and its target as a trainer has them on its device."""
    draft.to(DEVICE)
    rows = torch.empty(step.draft_vocabulary, step.hidden, dtype=DTYPES[step.precision], device=DEVICE)
    settings = TrainingConfig(
        precision=step.precision, recompute=step.recompute, loss_chunk_tokens=step.chunk_tokens, ema_decay=0.99
    )
    return DraftModule(draft, TargetProjection(rows, None, 1.0, None), settings, total_steps=1000)


def _batch(step: Step) -> MicroBatch:
    aux, last = (
        torch.empty(step.tokens, count * step.hidden, dtype=torch.bfloat16, device=DEVICE)
        for count in (len(AUX_LAYERS), 1)
    )
    tokens = torch.zeros(step.tokens, dtype=torch.int64)
    supervised = torch.ones_like(tokens, dtype=torch.bool)
    samples = PackedSamples(tokens, supervised, aux, last, step.lengths, top=tokens.int())
    return MicroBatch(1, 0, True, samples, step.tokens, step.tokens)


def report(step: Step, trace: Trace) -> dict[str, Any]:
    """All figures of a trace, as they are kept."""
    seconds = sum(kind.seconds for kind in trace.by_kind.values())
    flops = sum(kind.flops for kind in trace.by_kind.values())
    planned = step.planned_bytes()
    dearest = sorted(trace.by_operation.items(), key=lambda item: -item[1].seconds)[:12]
    return {
        "sizes": asdict(step),
        "predicted_ms": round(1e3 * seconds, 1),
        "predicted_mfu": round(flops / seconds / trace.hardware.flops, 3),
        "predicted_tokens_per_s": round(step.tokens / seconds),
        "kernels": sum(kind.kernels for kind in trace.by_kind.values()),
        "predicted_ms_by_kind": {name: round(1e3 * kind.seconds, 1) for name, kind in trace.by_kind.items()},
        "tflop": round(flops / 1e12, 2),
        "gigabytes": round(sum(kind.bytes for kind in trace.by_kind.values()) / 1e9, 1),
        "host_waits": dict(trace.waits),
        "traced_peak_gib": round(trace.peak / 2**30, 2),
        "planned_peak_gib": round(planned / 2**30, 2),
        "planned_of_traced": round(planned / trace.peak, 3),
        "dearest_operations": {
            f"{phase} {name}": f"{1e3 * found.seconds:.2f} ms, {found.kernels} kernels"
            for (phase, name), found in dearest
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--json", type=Path, default=RESULT)
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "commit": git_sha(),
        "torch": torch.__version__,
        "conditions": "PREDICTED from a dispatch trace, not measured on a GPU",
        "hardware": asdict(Hardware()),
        "steps": {},
    }
    for name in arguments.shapes:
        result["steps"][name] = report(SHAPES[name], trace_step(SHAPES[name]))
        print(name, json.dumps(result["steps"][name], indent=1), flush=True)
    write_atomically(arguments.json, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
