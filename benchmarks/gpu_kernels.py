"""Compiles what training compiles on GPUs (models/fused.py), for GPUs that are not there; nothing is run on one.

    python benchmarks/gpu_kernels.py [--capabilities 8.0 8.6 9.0 10.0 12.0] [--json benchmarks/results/gpu_kernels.json]

It needs the CUDA build of torch (`make BUILD='torch===2.13.0' .venv/.ready`) and g++, and no GPU. Every fused function
is collected from a traced step of Qwen3-8B's EAGLE-3 draft, with the shapes and dtypes of that step, and the losses of
block drafts are added. Inductor writes Triton kernels for each, with a first dimension that may vary, and ptxas
compiles them for each compute capability. Recorded are kernels by function, the greatest shared memory of one, and what
a function keeps in memory beside its inputs and results: nothing as large as an input, which the memory planner
relies on.

torch asks its driver for a GPU at many places; `_pretended` answers them.
"""

import argparse
import ctypes
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.config
import torch._inductor.fx_passes.joint_graph
import torch._inductor.fx_passes.post_grad
import torch._inductor.graph
import torch._inductor.runtime.triton_helpers
import torch._inductor.runtime.triton_heuristics as heuristics
from operation_trace import Trace
from roofline import SHAPES, Step, trace_step
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.device_interface import CudaInterface
from torch._dynamo.source import ConstantSource
from torch._inductor.compile_fx import compile_fx
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._pytree import tree_flatten, tree_unflatten

from infra.files.atomic import write_atomically
from infra.provenance import git_sha
from models.fused import NOTHING_KEPT, FusedFunction
from models.losses.chunked import LossDivergence
from models.losses.divergences import LKAlpha, LKLambda, MixedLoss

RESULT = Path(__file__).parent / "results" / "gpu_kernels.json"
SHARED = {"8.0": 166_912, "8.6": 101_376, "9.0": 232_448, "10.0": 232_448, "12.0": 101_376}
"""Bytes of shared memory that a block may take, by compute capability (CUDA C++ Programming Guide)."""
LOSSES = {
    "LK alpha": LKAlpha(), "LK lambda": LKLambda(3.0), "DSpark's": MixedLoss(0.1, 0.0, 0.9),
    "with KL": MixedLoss(0.3, 0.5, 0.9),
}  # fmt: skip
NO_DEVICE = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace { using NoDevice = c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>;
C10_REGISTER_GUARD_IMPL(CUDA, NoDevice) }
"""


class Call:
    """A call of a fused function: its tensors' shapes and dtypes, and its other arguments."""

    def __init__(self, function: FusedFunction, args: tuple[Any, ...], name: str = "") -> None:
        self.function, (self.leaves, self.structure) = function.function, tree_flatten(args)
        self.name = name or function.function.__name__.strip("_")
        self.tensors = [(tuple(x.shape), x.dtype) for x in self.leaves if isinstance(x, Tensor)]

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """What it gives and what it writes to."""
        given, before = iter(tensors), [x._version for x in tensors]
        leaves = [next(given) if isinstance(x, Tensor) else x for x in self.leaves]
        found = self.function(*tree_unflatten(leaves, self.structure))
        results = found if isinstance(found, tuple) else (found,)
        changed = (x for x, version in zip(tensors, before, strict=True) if x._version != version)
        return tuple(x for x in (*results, *changed) if x is not None)

    @property
    def key(self) -> str:
        return f"{self.name} {self.tensors[1:]} {[x for x in self.leaves if not isinstance(x, Tensor)]}"


def collected(step: Step) -> list[Call]:
    """The fused functions of a step, each with every number of tensors once, and the loss by all divergences."""
    calls = dict[str, Call]()
    call_fused = Trace.call_fused

    def call(trace: Trace, function: FusedFunction, *args: Any) -> Any:
        found = Call(function, args)
        calls.setdefault(found.key, found)
        if found.name == "diverge_rows":
            for name, divergence in LOSSES.items():
                other = _with_loss(function, args, divergence, f"diverge_rows, {name}")
                calls.setdefault(other.key, other)
        return call_fused(trace, function, *args)

    with patch.object(Trace, "call_fused", call):
        trace_step(step)
    return list(calls.values())


def _with_loss(function: FusedFunction, args: tuple[Any, ...], divergence: LossDivergence, name: str) -> Call:
    labels = torch.empty(len(args[0]), dtype=torch.int64) if divergence.labelled else None
    return Call(function, (*args[:4], labels, (divergence, True)), name)


class _Gpu:
    """Properties of a GPU, as torch and Triton read them."""

    def __init__(self, capability: str) -> None:
        self.major, self.minor = map(int, capability.split("."))
        self.name, self.total_memory, self.multi_processor_count = "a GPU", 80 * 2**30, 132
        self.shared_memory_per_block_optin, self.shared_memory_per_block = SHARED[capability], 49_152
        self.shared_memory_per_multiprocessor = SHARED[capability] + 1024
        self.regs_per_multiprocessor, self.warp_size, self.max_threads_per_block = 65_536, 32, 1024
        self.max_threads_per_multi_processor = 2048 if (self.major, self.minor) in ((8, 0), (9, 0), (10, 0)) else 1536
        self.L2_cache_size, self.gcnArchName = 50 * 2**20, ""


class _Driver:
    """Triton's, of a GPU on which nothing is launched."""

    def __init__(self, gpu: _Gpu) -> None:
        compiler: Any = import_module("triton.backends.compiler")
        self._target = compiler.GPUTarget("cuda", 10 * gpu.major + gpu.minor, gpu.warp_size)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0


@contextmanager
def _pretended(capability: str) -> Iterator[None]:
    """Everything that Inductor asks of a GPU is answered, and kernels are compiled but not loaded."""
    gpu, triton_runtime = _Gpu(capability), import_module("triton.runtime")  # of the CUDA build alone
    triton_runtime.driver.set_active(_Driver(gpu))
    DeviceProperties.create.cache_clear()
    answers: dict[Any, dict[str, Any]] = {
        torch.cuda: {
            "is_available": True, "device_count": 1, "current_device": 0, "is_initialized": True, "_lazy_init": None,
            "get_device_capability": (gpu.major, gpu.minor), "get_device_name": gpu.name, "set_device": None,
            "get_device_properties": gpu, "synchronize": None, "_exchange_device": 0, "_maybe_exchange_device": 0,
            "get_rng_state": torch.zeros(16, dtype=torch.uint8), "set_rng_state": None,
        },
        torch._C: {"_cuda_getCurrentRawStream": 0},
        CudaInterface: {
            "is_available": True, "current_device": 0, "get_raw_stream": 0, "get_device_properties": gpu,
        },
        CudaInterface.Worker: {"get_device_properties": gpu, "current_device": 0},
        fake_tensor: {"init_gpu_context": None},
        torch._inductor.runtime.triton_helpers: {"set_driver_to_gpu": None},
        # Patterns of attention, which are tried with tensors on the device.
        torch._inductor.fx_passes.joint_graph: {"lazy_init": None},
        torch._inductor.fx_passes.post_grad: {"lazy_init": None},
        heuristics.CachingAutotuner: {"_make_launchers": None},
    }  # fmt: skip
    patches = [
        patch.object(place, name, _answering(place, value))
        for place, named in answers.items()
        for name, value in named.items()
    ]
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()


def _answering(place: Any, value: Any) -> Any:
    def answer(*_given: Any, **_named: Any) -> Any:
        return value

    return staticmethod(answer) if isinstance(place, type) else answer


def compiled(call: Call, capability: str) -> dict[str, Any]:
    """Kernels of a call, their shared memory, and what they keep beside inputs and results."""
    source, kernels = list[str](), list[Any]()
    codegen, precompile = torch._inductor.graph.GraphLowering.codegen, heuristics.CachingAutotuner._precompile_config

    def keep_source(graph: Any) -> Any:
        found = codegen(graph)
        source.append(found[0].value)
        return found

    def keep_kernel(tuner: Any, config: Any) -> Any:
        found = precompile(tuner, config)
        kernels.append(found.kernel)
        return found

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    settings = {"fx_graph_cache": False, "compile_threads": 1, "joint_graph_constant_folding": False}
    with (
        _pretended(capability),
        patch.object(torch._inductor.graph.GraphLowering, "codegen", keep_source),
        patch.object(heuristics.CachingAutotuner, "_precompile_config", keep_kernel),
        torch._inductor.config.patch({**settings, **NOTHING_KEPT, "triton.store_cubin": False}),
        torch.no_grad(),
    ):
        compile_fx(*_traced(call, mode))
    launches = len(re.findall(r"^\s*\w+\.run\(", source[-1], re.MULTILINE))
    assert launches, "nothing was compiled"
    return {
        "kernels": launches,
        "shared_bytes": max(kernel.shared for kernel in kernels),
        "kept": _kept(source[-1], call),
    }


def _traced(call: Call, mode: FakeTensorMode) -> tuple[torch.fx.GraphModule, list[Tensor]]:
    """The call's graph on a GPU, and tensors for it whose first dimension may vary, as `FusedFunction` marks it."""
    assert mode.shape_env is not None
    rows, source = call.tensors[0][0][0], ConstantSource("rows")
    symbol = mode.shape_env.create_symbol(rows, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    varying: Any = mode.shape_env.create_symintnode(symbol, hint=rows, source=source)

    def tensors(device: str) -> list[Tensor]:
        with mode:
            return [
                torch.empty(*(varying if size == rows and not at else size for at, size in enumerate(shape)),
                            dtype=dtype, device=device)
                for shape, dtype in call.tensors
            ]  # fmt: skip

    # Traced on the CPU, where views need no driver, as a compiler traces it.
    with mode, enable_python_dispatcher(), patch.object(torch.compiler, "is_compiling", lambda: True):
        traced: Callable[..., Any] = make_fx(call, select_decomp_table(), tracing_mode="real")
        graph = traced(*tensors("cpu"))
    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
    graph.recompile()
    return graph, tensors("cuda")


def _kept(source: str, call: Call) -> list[str]:
    """Buffers of a size of the call's largest tensor or more that are no result."""
    rows, largest = call.tensors[0][0][0], max(torch.Size(shape).numel() for shape, _ in call.tensors)
    returned = re.findall(r"^\s*return \((.*)\)", source, re.MULTILINE)[-1]
    results = {name.strip() for name in returned.split(",")}
    found = []
    for name, sizes, dtype in re.findall(r"(\w+) = empty_strided_cuda\(\(([^)]*)\), .*, torch\.(\w+)\)", source):
        shape = [int(size) if size.isdigit() else rows for size in sizes.replace(" ", "").split(",") if size]
        # A result may take the memory of a buffer under another name.
        reused = {new for new, old in re.findall(r"(\w+) = (?:reinterpret_tensor\()?(\w+)\b", source) if old == name}
        if torch.Size(shape).numel() >= largest and not results & {name, *reused}:
            found.append(f"{dtype} {shape}")
    return found


def _without_a_device() -> None:
    """Device guards of CUDA do nothing from here on."""
    place = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(NO_DEVICE)
        command = ["g++", "-shared", "-fPIC", "-std=c++20", f"-I{place}/include", str(source), "-o", str(library)]
        subprocess.run([*command, f"-L{place}/lib", "-lc10"], check=True, timeout=300)
        ctypes.CDLL(str(library))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capabilities", nargs="+", default=list(SHARED), choices=SHARED)
    parser.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args()
    if torch.version.cuda is None or torch.cuda.is_available():
        parser.error("this is for the CUDA build of torch, on a machine without a GPU")
    calls = collected(SHAPES["recipe"])
    _without_a_device()
    found = dict[str, Any]()
    for capability in options.capabilities:
        for call in calls:
            one = compiled(call, capability)
            name = f"{call.name}, {len(call.tensors)} tensors"
            found.setdefault(name, {})[capability] = one
            print(capability, name, one, flush=True)
            assert one["shared_bytes"] <= SHARED[capability], (name, one)
    result = {
        "commit": git_sha(), "torch": torch.__version__, "conditions": "compiled by ptxas, not run on a GPU",
        "shapes": "recipe of roofline.py", "functions": found,
    }  # fmt: skip
    write_atomically(options.json, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
