"""How one sample's hidden states lie in named buffers. Known to generators and trainer ranks alike."""

from dataclasses import dataclass

import torch
from torch import Tensor

from infra.planner.traffic import bytes_per_token
from models.targets.model import HiddenStates


class SampleError(Exception):
    """This sample cannot be captured: values that are not finite, a prompt that the server refuses, missing rows.

    The only exception that counts against a sample, and only where the engine's canary still passes after it.
    """


@dataclass(frozen=True)
class HiddenStateLayout:
    """Shapes follow from the run: `aux` `[T, K*H]` and `last` `[T, H]` in `dtype`."""

    aux_count: int
    hidden_size: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return bytes_per_token(self.aux_count, self.hidden_size, self.dtype.itemsize)

    def check(self, hidden: HiddenStates, tokens: int) -> None:
        """Raise SampleError unless `hidden` has this layout's shapes for `tokens` positions, and finite values."""
        expected = {"aux": (tokens, self.aux_count * self.hidden_size), "last": (tokens, self.hidden_size)}
        for name, shape in expected.items():
            tensor: Tensor = getattr(hidden, name)
            if tuple(tensor.shape) != shape:
                raise SampleError(f"{name} has shape {list(tensor.shape)}, the run needs {list(shape)}")
            if not bool(torch.isfinite(tensor).all()):
                raise SampleError(f"{name} has values that are not finite; try generator.compute_dtype=float32")

    def pack(self, hidden: HiddenStates) -> dict[str, memoryview]:
        """Buffers of one captured sample, in the stored data type, on the CPU."""
        return {"aux": as_bytes(self._stored(hidden.aux)), "last": as_bytes(self._stored(hidden.last))}

    def _stored(self, tensor: Tensor) -> Tensor:
        return tensor.to("cpu", self.dtype).contiguous()

    def empty(
        self, tokens: int, last: int | None = None, pinned: bool = False, device: torch.device | None = None
    ) -> HiddenStates:
        """Memory for `tokens` positions, to be filled by a transport; `pinned`: a GPU copies from it by itself.

        `last`: for so many positions' last states, where these are others.
        """
        shapes = (tokens, self.aux_count * self.hidden_size), (tokens if last is None else last, self.hidden_size)
        aux, last_states = (torch.empty(*s, dtype=self.dtype, pin_memory=pinned, device=device) for s in shapes)
        return HiddenStates(aux=aux, last=last_states)

    def views(self, hidden: HiddenStates) -> dict[str, memoryview]:
        """Where a transport writes `hidden`, which is contiguous."""
        return {"aux": as_bytes(hidden.aux), "last": as_bytes(hidden.last)}


def as_bytes(tensor: Tensor) -> memoryview:
    """A writable view of a contiguous CPU tensor's bytes."""
    assert tensor.is_contiguous()
    return tensor.view(torch.uint8).numpy().reshape(-1).data
