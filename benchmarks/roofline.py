"""A draft step's predicted time on a GPU, from a trace of its operations; no GPU is needed.

    python benchmarks/roofline.py [--shapes recipe short] [--json benchmarks/results/roofline.json]

A whole EAGLE-3 training step (forward, backward, clipping, AdamW, moving average) runs on the tests' emulated
accelerator without values, so that every operation is seen with its shapes and dtypes. An operation takes as long as
its arithmetic or its memory traffic, whichever is longer, at the shares of the peak in `Hardware`; launches, gaps and
host waits cost nothing, so every figure is a prediction of what is possible, not a measurement. Matrix products are
told from attention and from everything else ("element-wise").

Bytes are those of inputs and outputs, each once. Kernels are operations that are no view; `logsumexp` counts for the
five that torch makes of it. Every position is supervised and lies in the draft vocabulary.
"""

import argparse
import json
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from draft_contestants import AUX_LAYERS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from infra.files.atomic import write_atomically
from infra.planner.memory import Setting, rank_memory
from infra.planner.shapes import Precision, TargetShape
from infra.provenance import git_sha
from models.config.eagle3 import Eagle3Config
from models.config.training import TrainingConfig
from models.drafts.base import PackedSamples, TargetProjection
from models.drafts.eagle3.module import Eagle3Draft
from models.drafts.vocabulary import DraftVocabulary
from models.dtypes import DTYPES
from models.losses import chunked
from models.training.lightning_module import DraftModule
from models.training.stream import MicroBatch

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from emulated_device import DEVICE, EmulatedTensor, emulated_device

RESULT = Path(__file__).parent / "results" / "roofline.json"
ALIGNED = 512
"""Bytes that the caching allocator's sizes are multiples of."""


@dataclass(frozen=True)
class Hardware:
    """Peaks of one GPU, and the shares of them that good kernels reach (assumed)."""

    name: str = "H100 SXM"
    flops: float = 989e12
    """Dense bfloat16."""
    flops_float32: float = 67e12
    bytes_per_s: float = 3.35e12
    product_share: float = 0.75
    attention_forward_share: float = 0.42
    attention_backward_share: float = 0.32
    """FlashAttention 2 as torch has it, on Hopper."""
    memory_share: float = 0.85


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
    chunk_tokens: int = 256
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
    "recipe": Step(),
    "short": Step(lengths=(550,)),
    "long": Step(lengths=(4096,)),
    "128k": Step(lengths=(131_072,), ttt_steps=4, recompute=True),
}
"""A draft of Qwen3-8B: the recipe's micro-batch, one chat, one long sample, and one that needs 80 GB."""

VIEWS = frozenset(
    [
        "alias",
        "as_strided",
        "chunk",
        "detach",
        "expand",
        "lift_fresh",
        "permute",
        "reshape",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "t",
        "transpose",
        "unbind",
        "unflatten",
        "unsqueeze",
        "view",
        "_reshape_alias",
        "_unsafe_view",
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "is_same_size",
    ]
)
WRITES_ONLY = frozenset(
    [
        "zero_",
        "fill_",
        "zeros",
        "zeros_like",
        "ones",
        "ones_like",
        "new_zeros",
        "new_ones",
        "full",
        "full_like",
        "arange",
    ]
)
READS_ROWS = frozenset({"embedding", "index", "index_select", "gather"})
WRITES_ROWS = frozenset({"index_put", "index_put_", "index_copy_"})
WAITS = frozenset({"nonzero", "_local_scalar_dense", "is_nonzero", "equal", "repeat_interleave"})
"""Operations for which the host waits."""
LOGSUMEXP_KERNELS = 5
"""Maximum, difference, exponential, sum and logarithm: the scores are read three times more, and written twice."""


@dataclass
class Sum:
    """Operations of one kind."""

    kernels: int = 0
    flops: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0

    def add(self, kernels: int, flops: float, moved: float, seconds: float) -> None:
        self.kernels += kernels
        self.flops += flops
        self.bytes += moved
        self.seconds += seconds


@dataclass
class Trace(TorchDispatchMode):
    """Counts what runs on the emulated device inside of it."""

    lengths: tuple[int, ...]
    hardware: Hardware
    by_operation: dict[tuple[str, str], Sum] = field(default_factory=lambda: defaultdict(Sum))
    """By phase and name."""
    by_kind: dict[str, Sum] = field(default_factory=lambda: defaultdict(Sum))
    waits: Counter[str] = field(default_factory=Counter)
    peak: int = 0
    _alive: dict[int, int] = field(default_factory=dict)
    _phase: str = ""

    def __post_init__(self) -> None:
        super().__init__()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self._phase = name
        yield
        self._phase = ""

    def keep(self, tensor: Tensor) -> None:
        """Count a tensor's memory until it is freed."""
        if not isinstance(tensor, EmulatedTensor):
            return
        storage = tensor.data_on_cpu.untyped_storage()
        if storage._cdata in self._alive:
            return
        self._alive[storage._cdata] = -(-storage.nbytes() // ALIGNED) * ALIGNED
        weakref.finalize(storage, self._alive.pop, storage._cdata)
        self.peak = max(self.peak, sum(self._alive.values()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        out = self._answer(name, args) if name in WAITS or _by_mask(name, args) else None
        out = func(*args, **kwargs) if out is None else out
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        for tensor in results:
            self.keep(tensor)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if name not in VIEWS and any(isinstance(x, EmulatedTensor) for x in (*given, *results)):
            self._count(func, name, (args, kwargs, out), given, results)
        return out

    def _answer(self, name: str, args: Any) -> Any:
        """What depends on values: everything is supervised, covered, finite and not zero."""
        if not any(isinstance(leaf, EmulatedTensor) for leaf in tree_leaves(args)):
            return None
        self.waits[name if name in WAITS else "index by a mask"] += 1
        if name == "nonzero":
            return torch.arange(len(args[0]), device=DEVICE).unsqueeze(1)
        if name == "repeat_interleave":
            return torch.zeros(sum(self.lengths), dtype=torch.int64, device=DEVICE)
        return args[0].flatten() if name not in WAITS else 1.0

    def _count(self, func: Any, name: str, call: Any, given: list[Tensor], results: list[Tensor]) -> None:
        args, kwargs, out = call
        hardware, kernels = self.hardware, 1
        moved = float(sum(map(_touched, (*given, *results))))
        if name in WRITES_ONLY:
            moved = sum(map(_touched, results))
        elif name in READS_ROWS:
            moved = 2 * sum(map(_touched, results))
        elif name in WRITES_ROWS:
            moved = 2 * _touched(given[-1])
        elif name == "copy_":
            moved = sum(map(_touched, given))
        elif name == "logsumexp":
            kernels, moved = LOGSUMEXP_KERNELS, moved + 5 * _touched(given[0])
        kind, flops, arithmetic = "element-wise", 0.0, 0.0
        if name.startswith("_flash_attention"):
            backward = name.endswith("backward")
            share = hardware.attention_backward_share if backward else hardware.attention_forward_share
            pairs = sum(length * length / 2 for length in self.lengths)
            flops = 4 * given[0].shape[1] * given[0].shape[2] * pairs * (2.5 if backward else 1)
            kind, arithmetic = "attention", flops / hardware.flops / share
        elif (formula := flop_registry.get(func._overloadpacket)) is not None:
            flops = float(formula(*args, **{k: v for k, v in kwargs.items() if k != "out"}, out_val=out))
            peak = hardware.flops_float32 if given[-1].dtype == torch.float32 else hardware.flops
            kind, arithmetic = "products", flops / peak / hardware.product_share
        seconds = max(arithmetic, moved / hardware.bytes_per_s / hardware.memory_share)
        for total in (self.by_kind[kind], self.by_operation[self._phase, name]):
            total.add(kernels, flops, moved, seconds)


def _by_mask(name: str, args: Any) -> bool:
    return name == "index" and any(x is not None and x.dtype == torch.bool for x in args[1])


def _touched(tensor: Tensor) -> int:
    """Bytes of a tensor's distinct elements."""
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count if isinstance(tensor, EmulatedTensor) else 0


def trace_step(step: Step, hardware: Hardware = Hardware()) -> Trace:
    """One optimizer step, the optimizer's state and the moving average there from the start."""
    chunked.BLOCK_BYTES[DEVICE.type] = chunked.BLOCK_BYTES["cuda"]
    draft = _draft(step)
    with emulated_device(without_values=True), Trace(step.lengths, hardware) as trace:
        # The next micro-batch waits on the device.
        module, batch, _next = _module(step, draft), _batch(step), _batch(step)
        optimizer = module.configure_optimizers()["optimizer"]
        for group in optimizer.param_groups:
            for p in group["params"]:
                state = {name: torch.empty_like(p) for name in ("exp_avg", "exp_avg_sq")}
                optimizer.state[p] = state | {"step": torch.zeros((), device=DEVICE)}
        trace.by_kind.clear()
        trace.by_operation.clear()
        trace.waits.clear()
        with trace.phase("forward"), torch.autocast(DEVICE.type, torch.bfloat16, step.precision == "bfloat16"):
            loss = module.training_step(batch, 0)
        module.outcome = None
        with trace.phase("backward"):
            loss.backward()
        with trace.phase("optimizer"):
            module.configure_gradient_clipping(optimizer)
            optimizer.step()
            module.average(100)
        return trace


def _draft(step: Step) -> Eagle3Draft:
    vocabulary = DraftVocabulary(torch.arange(step.draft_vocabulary), step.vocabulary)
    with torch.device("meta"):
        return Eagle3Draft(step.config, torch.empty(step.vocabulary, step.hidden), vocabulary, AUX_LAYERS)


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
