"""An accelerator for tests without one: computes on the CPU, reports another device, and raises when devices mix.

Inside `emulated_device()` tensors made with `device="emulated"` or moved there report the device `emulated:0`. An
operation between them and CPU tensors raises RuntimeError where CUDA would raise. Copies to the host, and operations
for which the host would wait on a GPU, are counted. With `without_values=True` tensors of the device have shapes alone
(on torch's `meta` device), so that a step of any size can be traced.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ClassVar

import emulated_flash
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "emulated"
HOST_WAITS = frozenset(
    {"_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "bincount", "is_nonzero"}
)
"""Operations whose result the host needs before it can go on."""
MAY_MIX = frozenset({"copy_", "_to_copy"})
INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"})
"""CUDA takes index tensors of the host for its own tensors, and copies them over."""


class _Module:
    """What torch asks of a device's module. Other tests of the process must not find a device."""

    is_present = False

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return self.is_present

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return int(self.is_present)

    def get_rng_state(self, _device: Any) -> torch.Tensor:
        """Empty: the host's generators draw for the device, and their states are kept as such."""
        return torch.empty(0, dtype=torch.uint8)

    def set_rng_state(self, _state: torch.Tensor, _device: Any) -> None:
        pass

    def manual_seed_all(self, seed: int) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


_setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
DEVICE = torch.device(NAME, 0)
_values_on = torch.device("cpu")
"""Where tensors of the device have their values."""


def _add_wide_product(
    total: torch.Tensor, first: torch.Tensor, second: torch.Tensor, dtype: torch.dtype, *, out: torch.Tensor
) -> torch.Tensor:
    """`aten::addmm.dtype_out`: a product of half precision, added up in float32."""
    assert total.dtype == out.dtype == dtype
    return out.copy_(total + first.to(dtype) @ second.to(dtype))


OF_THE_DEVICE = {
    "_flash_attention_forward": emulated_flash.forward,
    "_flash_attention_backward": emulated_flash.backward,
    "addmm.dtype_out": _add_wide_product,
}
"""Operations that the CPU does not have."""
IN_LOW_PRECISION = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "scaled_dot_product_attention", "conv1d")
"""What autocast computes in its low-precision type on a GPU, of what drafts and targets use."""
IN_FLOAT32 = (
    "softmax.int",
    "log_softmax.int",
    "logsumexp",
    "layer_norm",
    "cumsum",
    "pow.Tensor_Scalar",
    "rsqrt",
    "exp",
    "log",
)


# The first backward pass of a process starts autograd's thread of every device that is there.
_Module.is_present = True
torch.ones((), requires_grad=True).backward()
_Module.is_present = False

_autocast = torch.library.Library("aten", "IMPL")
_fallback = torch.library.Library("_", "IMPL")
_fallback.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")


def _cast(name: str, dtype: torch.dtype | None) -> None:
    """Let autocast run the operation in `dtype`; None: in autocast's own type."""
    packet, _, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.aten, packet), overload or "default")

    def run(*args: Any, **kwargs: Any) -> Any:
        # Below autocast's key, or the operations that this one is made of would be cast again.
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)):
            return operation(*tree_map(cast, args), **tree_map(cast, kwargs))

    def cast(leaf: Any) -> Any:
        is_float = isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.device.type == NAME
        return leaf.to(dtype or torch.get_autocast_dtype(NAME)) if is_float else leaf

    _autocast.impl(name, run, "AutocastPrivateUse1")


for _name in IN_LOW_PRECISION:
    _cast(_name, None)
for _name in IN_FLOAT32:
    _cast(_name, torch.float32)


@dataclass
class Traffic:
    """What crossed between host and device."""

    to_host: list[int] = field(default_factory=list)
    """Bytes of each copy."""
    to_device: list[int] = field(default_factory=list)
    waits: Counter[str] = field(default_factory=Counter)
    """Times that the host waited, by operation; each copy to the host is one."""

    def clear(self) -> None:
        """Begin to count anew."""
        self.to_host.clear()
        self.to_device.clear()
        self.waits.clear()


class EmulatedTensor(torch.Tensor):
    """A tensor on the emulated device; `data_on_cpu` holds its values."""

    data_on_cpu: torch.Tensor

    # Here and not on torch.Tensor for a while: Python keeps the slots of such a patch, and every tensor of the process
    # would count as a sequence from then on, which `torch.tensor([a_number_on_a_tensor])` does not bear.
    def __getitem__(self, index: Any) -> torch.Tensor:
        return super().__getitem__(_on_device(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_on_device(index), value)

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> "EmulatedTensor":
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=DEVICE,
        )
        tensor.data_on_cpu = values
        return tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"EmulatedTensor({self.data_on_cpu})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {}, Traffic())


class _Stream:
    """Every stream of the device: work is done when it is asked for."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def wait_stream(self, _other: "_Stream") -> None:
        """The host does not wait."""

    def record_event(self) -> "_Stream":
        """An event: everything is done already."""
        return self

    def synchronize(self) -> None:
        self._traffic.waits["synchronize"] += 1


class _Operations(TorchDispatchMode):
    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self.traffic = traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {}, self.traffic)


def _on_device(index: Any) -> Any:
    """Lists of an index as tensors on the device, where CUDA copies them to."""
    if isinstance(index, list):
        return torch.tensor(index).to(DEVICE)
    return tuple(map(_on_device, index)) if isinstance(index, tuple) else index


class EmulatedGenerator(torch.Generator):
    """A generator that knows for which device it was made; torch has none for this one."""

    _on_device: ClassVar[dict[int, torch.Generator]] = {}
    """By address; kept here, so that no other one gets the address."""

    def __new__(cls, device: Any = "cpu") -> "EmulatedGenerator":
        generator = super().__new__(cls)
        if _is_emulated(device):
            cls._on_device[generator._cdata] = generator
        return generator

    @classmethod
    def check(cls, name: str, generator: torch.Generator, on_device: bool) -> None:
        """Raise RuntimeError for a generator of another device than the operation's."""
        if (generator._cdata in cls._on_device) != on_device:
            raise RuntimeError(f"{name}: the generator is not of the tensor's device")


@contextmanager
def emulated_device(without_values: bool = False) -> Iterator[Traffic]:
    """Make the device available to this thread; yields what crosses between it and the host."""
    traffic = Traffic()
    with _Operations(traffic), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "Generator", EmulatedGenerator)
        stream = _Stream(traffic)
        patch.setattr(torch.cuda, "Stream", lambda _device: stream)
        patch.setattr(torch.cuda, "current_stream", lambda _device=None: stream)
        patch.setattr(torch.cuda, "stream", lambda _stream: nullcontext())
        patch.setattr(_Module, "is_present", True)
        patch.setitem(globals(), "_values_on", torch.device("meta" if without_values else "cpu"))
        _answer_before_dispatch(patch)
        yield traffic


def _answer_before_dispatch(patch: pytest.MonkeyPatch) -> None:
    """What torch answers in C++ before it dispatches an operation."""

    def replace(place: Any, name: str, answer: Callable[..., Any]) -> None:
        own = getattr(place, name)

        @wraps(own)
        def run(*args: Any, **kwargs: Any) -> Any:
            emulated = isinstance(args[0], EmulatedTensor) or _is_emulated(kwargs.get("device"))
            return answer(own, *args, **kwargs) if emulated else own(*args, **kwargs)

        patch.setattr(place, name, run)

    def make(own: Any, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        return own(*args, **kwargs) if device is None else own(*args, **kwargs).to(device)

    def refuse(_own: Any, *_: Any) -> None:
        raise TypeError(f"cannot convert a tensor on {DEVICE} to numpy: copy it to host memory first")

    for name in ("tensor", "as_tensor", "asarray"):
        replace(torch, name, make)
    replace(
        torch.Tensor, "new_tensor", lambda own, x, *args, **options: make(own, x.cpu(), *args, **options).to(DEVICE)
    )
    replace(torch.Tensor, "tolist", lambda own, x: own(x.detach().cpu()))
    replace(torch.Tensor, "record_stream", lambda *_: None)
    replace(torch.Tensor, "numpy", refuse)
    replace(torch.Tensor, "__array__", refuse)


def _is_emulated(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def _run(func: Any, args: Any, kwargs: dict[str, Any], traffic: Traffic) -> Any:
    name = func._schema.name.removeprefix("aten::")
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    emulated = [tensor for tensor in tensors if isinstance(tensor, EmulatedTensor)]
    if name == "_to_copy":
        return _copy(func, args[0], kwargs, traffic)
    if emulated:
        _refuse_mixture(name, args, tensors)
    _count(name, args, emulated, traffic)
    on_device = bool(emulated) or _is_emulated(kwargs.get("device"))
    if kwargs.get("generator") is not None:
        EmulatedGenerator.check(name, kwargs["generator"], on_device)
    if name in ("set_", "_local_scalar_dense", "equal", "is_nonzero"):
        on_device = False
    plain_kwargs = kwargs | ({"device": _values_on if on_device else torch.device("cpu")} if "device" in kwargs else {})
    plain_kwargs.pop("pin_memory", None)
    compute = OF_THE_DEVICE.get(_overload(func, name), func) if _values_on.type == "cpu" else func
    out = compute(*tree_map(_values, args), **tree_map(_values, plain_kwargs))
    if not on_device:
        return out
    same = {id(tensor.data_on_cpu): tensor for tensor in emulated}
    return tree_map(lambda x: _wrapped(x, same) if isinstance(x, torch.Tensor) else x, out)


def _overload(func: Any, name: str) -> str:
    return f"{name}.{func._schema.overload_name}".removesuffix(".")


def _wrapped(values: torch.Tensor, same: dict[int, EmulatedTensor]) -> EmulatedTensor:
    """The tensor itself where an operation worked in place, else a new one."""
    tensor = same.get(id(values))
    return EmulatedTensor(values) if tensor is None else tensor


def _values(leaf: Any) -> Any:
    return leaf.data_on_cpu if isinstance(leaf, EmulatedTensor) else leaf


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _copy(func: Any, source: torch.Tensor, kwargs: dict[str, Any], traffic: Traffic) -> torch.Tensor:
    device = kwargs.get("device", source.device)
    rest = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory", "non_blocking")}
    out = func(_values(source), **rest)
    if _is_emulated(device):
        if not isinstance(source, EmulatedTensor):
            traffic.to_device.append(_bytes(out))
            # CUDA copies from pageable memory when all work before is done.
            traffic.waits["copy to the device"] += not kwargs.get("non_blocking", False)
        return EmulatedTensor(out.to(_values_on))
    if isinstance(source, EmulatedTensor):
        traffic.to_host.append(_bytes(out))
        traffic.waits["copy to the host"] += not kwargs.get("non_blocking", False)
    return out


def _count(name: str, args: Any, emulated: list[EmulatedTensor], traffic: Traffic) -> None:
    if not emulated:
        return
    if name in HOST_WAITS:
        traffic.waits[name] += 1
    elif name in INDEXING and any(x is not None and x.dtype == torch.bool for x in args[1]):
        traffic.waits["index by a mask"] += 1
    elif name == "repeat_interleave":
        traffic.waits[name] += 1
    elif name == "copy_" and not isinstance(args[0], EmulatedTensor):
        traffic.to_host.append(_bytes(args[0]))
        traffic.waits["copy to the host"] += not (len(args) > 2 and args[2])
    elif name == "copy_" and not isinstance(args[1], EmulatedTensor):
        traffic.to_device.append(_bytes(args[1]))
        traffic.waits["copy to the device"] += not (len(args) > 2 and args[2])


def _refuse_mixture(name: str, args: Any, tensors: list[torch.Tensor]) -> None:
    if name in MAY_MIX or (name in INDEXING and isinstance(args[0], EmulatedTensor)):
        return
    mixed = [tuple(x.shape) for x in tensors if not isinstance(x, EmulatedTensor) and x.dim() > 0]
    if mixed:
        raise RuntimeError(f"{name}: expected all tensors on {DEVICE}, but tensors of shapes {mixed} are on cpu")
