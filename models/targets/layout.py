"""The layout of one sample's hidden states in named buffers, between generators and trainer ranks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from infra.planner.traffic import bytes_per_token
from models.targets.model import HiddenStates


class SampleError(Exception):
    """This sample cannot be captured: values that are not finite, a refused prompt, or missing rows.

    The only exception that counts as a failed attempt, and only if the engine's canary still passes after it.
    """


@dataclass(frozen=True)
class HiddenStateLayout:
    """Hidden states of a run: `aux` `[T, K*H]` and `last` `[T, H]` in `dtype`."""

    aux_count: int
    hidden_size: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return bytes_per_token(self.aux_count, self.hidden_size, self.dtype.itemsize)

    def check(self, hidden: HiddenStates, tokens: int) -> None:
        """Raise SampleError unless `hidden` has the right shapes for `tokens` positions and finite values."""
        expected = {"aux": (tokens, self.aux_count * self.hidden_size), "last": (tokens, self.hidden_size)}
        for name, shape in expected.items():
            tensor: Tensor = getattr(hidden, name)
            if tuple(tensor.shape) != shape:
                raise SampleError(f"{name} has shape {list(tensor.shape)}, the run needs {list(shape)}")
            if not bool(torch.isfinite(tensor).all()):
                raise SampleError(f"{name} has values that are not finite; try generator.compute_dtype=float32")

    def pack(self, hidden: HiddenStates) -> dict[str, memoryview]:
        """CPU buffers of one captured sample in the stored data type."""
        stored = (tensor.to("cpu", self.dtype).contiguous() for tensor in (hidden.aux, hidden.last))
        return self.views(HiddenStates(*stored))

    def empty(
        self, tokens: int, last: int | None = None, pinned: bool = False, device: torch.device | None = None
    ) -> HiddenStates:
        """Uninitialized memory for `tokens` positions, which a transport fills.

        `last`: number of positions of the last states, if it differs. `pinned`: page-locked, for asynchronous copies.
        """
        shapes = (tokens, self.aux_count * self.hidden_size), (tokens if last is None else last, self.hidden_size)
        aux, last_states = (torch.empty(*s, dtype=self.dtype, pin_memory=pinned, device=device) for s in shapes)
        return HiddenStates(aux=aux, last=last_states)

    def views(self, hidden: HiddenStates) -> dict[str, memoryview]:
        """Views through which a transport fills `hidden`, which is contiguous."""
        return {"aux": as_bytes(hidden.aux), "last": as_bytes(hidden.last)}


def as_bytes(tensor: Tensor) -> memoryview:
    """A writable view of a contiguous CPU tensor's bytes."""
    assert tensor.is_contiguous()
    return tensor.view(torch.uint8).numpy().reshape(-1).data
