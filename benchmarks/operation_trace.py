"""Counts the operations of a step on the emulated device: kernels, bytes, arithmetic, memory, host waits.

Bytes are those of inputs and outputs, each once. Kernels are operations that are no view; `logsumexp` counts for the
five that torch makes of it. A fused function (models/fused.py) is compiled on a GPU: it counts as if it read its inputs
and wrote its outputs once and kept nothing else, unless `FUSED` says otherwise.
"""

import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from models.fused import FusedFunction

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from emulated_device import DEVICE, EmulatedTensor, emulated_device

__all__ = ["DEVICE", "Hardware", "Trace", "emulated_device"]

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
FUSED = {
    "_norm_backward": (3, 2), "_paired_norm": (3, 2), "_diverge_rows": (4, 2), "_merge_rows": (4, 1),
    "_add_own_gradients_of_rows": (2, 2),
}  # fmt: skip
"""Kernels that Inductor makes of a fused function (gpu_kernels.py), and how often they read its inputs, where that is
not one and once."""
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
    product_dtypes: set[torch.dtype] = field(default_factory=set)
    """Of the factors of all matrix products."""
    peak: int = 0
    _alive: dict[int, int] = field(default_factory=dict)
    _phase: str = ""
    _fusing: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def call_fused(self, function: FusedFunction, *args: Any) -> Any:
        """Runs in place of `FusedFunction.__call__`."""
        given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        versions = [tensor._version for tensor in given]
        self._fusing = True
        out = function.function(*args)
        self._fusing = False
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        for tensor in results:
            self.keep(tensor)
        written = [x for x, version in zip(given, versions, strict=True) if x._version != version]
        name = function.function.__name__
        kernels, reads = FUSED.get(name, (1, 1))
        moved = float(reads * sum(map(_touched, given)) + sum(map(_touched, (*written, *results))))
        seconds = moved / self.hardware.bytes_per_s / self.hardware.memory_share
        for total in (self.by_kind["element-wise"], self.by_operation[self._phase, f"fused {name}"]):
            total.add(kernels, 0.0, moved, seconds)
        return out

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
        if self._fusing:
            return out
        results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        for tensor in results:
            self.keep(tensor)
        read = {key: value for key, value in kwargs.items() if key != "out"}
        given = [leaf for leaf in tree_leaves((args, read)) if isinstance(leaf, Tensor)]
        if name not in VIEWS and any(isinstance(x, EmulatedTensor) for x in (*given, *results)):
            self._count(func, name, (args, out), given, results)
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
        args, out = call
        hardware, kernels = self.hardware, 1
        moved = float(sum(map(_touched, (*given, *results))))
        if not results:
            written = (x for x, of in zip(args, func._schema.arguments, strict=False) if of.alias_info is not None)
            moved += sum(map(_touched, tree_leaves([x for x in written if isinstance(x, list)])))
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
        elif (formula := flop_registry.get(getattr(torch.ops.aten, name.removesuffix("_"), None))) is not None:
            flops = float(formula(*(x for x in args if not isinstance(x, torch.dtype)), out_val=out))
            peak = hardware.flops_float32 if given[-1].dtype == torch.float32 else hardware.flops
            self.product_dtypes.add(given[-1].dtype)
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
