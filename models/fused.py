"""Functions that are one kernel on a GPU: compiled on CUDA, run operation by operation elsewhere."""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._triton import has_triton

RECOMPILE_LIMIT = 64
"""Variants of a function that are compiled before it runs uncompiled: by dtypes, and by the number of tensors."""
NOTHING_KEPT = dict.fromkeys(
    ("realize_reads_threshold", "realize_opcount_threshold", "realize_acc_reads_threshold"), 10_000
)
"""Inductor (torch 2.13) writes what takes many reads or operations to memory, in float32, before several use it. The LK
losses and those of block drafts took once or twice their logits in float32 in this way. Without its limits nothing of
the size of an input is kept (benchmarks/gpu_kernels.py)."""


def compiles(device: torch.device) -> bool:
    """Whether fused functions are compiled on this device, so that their temporaries take no memory."""
    return device.type == "cuda" and has_triton()


class FusedFunction:
    """A function of tensors without gradients; the first dimension of its tensors may differ from call to call.

    Called with the tensors first. A function that writes to an argument says so.
    """

    def __init__(self, function: Callable[..., Any]):
        self.function, self.__doc__ = function, function.__doc__

    def __call__(self, *args: Any) -> Any:
        if not compiles(args[0].device):
            return self.function(*args)
        # Rows vary with the samples: without the mark the second length, and each of the next ones, would compile anew.
        for arg in args:
            if isinstance(arg, Tensor) and arg.dim():
                torch._dynamo.maybe_mark_dynamic(arg, 0)
        return self.compiled(*args)

    @cached_property
    def compiled(self) -> Callable[..., Any]:
        compile_it: Any = torch.compile
        limits = {"recompile_limit": RECOMPILE_LIMIT, "isolate_recompiles": True}
        return compile_it(self.function, fullgraph=True, options=NOTHING_KEPT, **limits)


fused = FusedFunction
"""Decorates a function that is one kernel on a GPU."""
