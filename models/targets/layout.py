"""The layout of one sample's hidden states in named buffers, between generators and trainer ranks."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from infra.planner.traffic import bytes_per_token
from models.targets.float8 import FLOAT8, SCALE_BYTES, decode, encode
from models.targets.hidden_states import HiddenStates


class SampleError(Exception):
    """This sample cannot be captured: values that are not finite, a refused prompt, or missing rows.

    The only exception that counts as a failed attempt, and only if the engine's canary still passes after it.
    """


@dataclass(frozen=True)
class HiddenStateLayout:
    """Hidden states of a run: `aux` `[T, K*H]`, `last` and perhaps `embedded` `[T, H]` in `dtype`, perhaps `places`
    `[T, 3]` and `top` `[T]` int32.

    With `dtype=FLOAT8` rows are stored as models.targets.float8 describes, and restored in bfloat16.
    """

    aux_count: int
    hidden_size: int
    dtype: torch.dtype
    top_token: bool = False
    """Whether the target's top token belongs to it."""
    embedded: bool = False
    """Whether the embeddings that the target read belong to it, and their places."""

    @property
    def bytes_per_token(self) -> int:
        item = self.dtype.itemsize
        return bytes_per_token(self.aux_count, self.hidden_size, item, self.top_token, self.embedded)

    @property
    def restored_dtype(self) -> torch.dtype:
        """Data type of what is read back."""
        return torch.bfloat16 if self.dtype == FLOAT8 else self.dtype

    def by_layer(self, aux: Tensor) -> tuple[Tensor, ...]:
        """`[..., K*H]` as K times `[..., H]`."""
        return aux.unflatten(-1, (self.aux_count, self.hidden_size)).unbind(-2)

    def check(self, hidden: HiddenStates, tokens: int) -> None:
        """Raise SampleError unless `hidden` has the right shapes for `tokens` positions and finite values."""
        self.check_shapes(hidden, tokens)
        check_finite(finite_rows(hidden).cpu())

    def check_shapes(self, hidden: HiddenStates, tokens: int) -> None:
        """Raise SampleError unless `hidden` has the right shapes for `tokens` positions."""
        for name, shape in self._shapes(tokens, tokens, stored=hidden.aux.dtype == FLOAT8).items():
            tensor: Tensor = getattr(hidden, name)
            if tuple(tensor.shape) != shape:
                raise SampleError(f"{name} has shape {list(tensor.shape)}, the run needs {list(shape)}")

    def stored(self, hidden: HiddenStates) -> HiddenStates:
        """One sample, or the rows of several, in the stored data types, on their device. Idempotent."""
        tensors = {name: hidden.named()[name] for name in self._shapes(0, 0)}
        if self.dtype == FLOAT8 and hidden.aux.dtype != FLOAT8:
            tensors |= {name: encode(tensors[name], groups) for name, groups in self._groups.items()}
        return HiddenStates(**{name: tensor.to(self._dtype(name)).contiguous() for name, tensor in tensors.items()})

    def restored(self, stored: HiddenStates) -> HiddenStates:
        """Stored rows as numbers that products take, on their device."""
        if self.dtype != FLOAT8:
            return stored
        rows = {
            name: decode(tensor, self._groups[name], self.restored_dtype)
            for name, tensor in stored.named().items()
            if name in self._groups
        }
        return replace(stored, **rows)

    def pack(self, hidden: HiddenStates) -> dict[str, memoryview]:
        """CPU buffers of one captured sample in the stored data type."""
        stored = {name: tensor.cpu() for name, tensor in self.stored(hidden).named().items()}
        return self.views(HiddenStates(**stored))

    def empty(
        self, tokens: int, last: int | None = None, pinned: bool = False, device: torch.device | None = None
    ) -> HiddenStates:
        """Uninitialized memory for `tokens` positions, which a transport fills.

        `last`: positions of last states, top tokens and embeddings, if it differs. `pinned`: page-locked, for
        asynchronous copies.
        """
        shapes = self._shapes(tokens, tokens if last is None else last)
        return HiddenStates(
            **{
                name: torch.empty(*shape, dtype=self._dtype(name), pin_memory=pinned, device=device)
                for name, shape in shapes.items()
            }
        )

    def views(self, hidden: HiddenStates) -> dict[str, memoryview]:
        """Views through which a transport fills `hidden`, which is contiguous; none of `aux` where K is 0."""
        return {name: as_bytes(tensor) for name, tensor in hidden.named().items() if tensor.shape[-1:] != (0,)}

    @property
    def _groups(self) -> dict[str, int]:
        """Layers in a row."""
        return {"aux": self.aux_count, "last": 1} | ({"embedded": 1} if self.embedded else {})

    def _shapes(self, tokens: int, last: int, stored: bool = True) -> dict[str, tuple[int, ...]]:
        """In the order in which buffers lie in an object."""
        width = self.hidden_size + (SCALE_BYTES if stored and self.dtype == FLOAT8 else 0)
        shapes: dict[str, tuple[int, ...]] = {"aux": (tokens, self.aux_count * width), "last": (last, width)}
        shapes |= {"embedded": (last, width), "places": (tokens, 3)} if self.embedded else {}
        return shapes | ({"top": (last,)} if self.top_token else {})

    def _dtype(self, name: str) -> torch.dtype:
        return torch.int32 if name in ("top", "places") else self.dtype


def finite_rows(hidden: HiddenStates) -> Tensor:
    """`[2, T]` bool, on their device: whether row t of `aux` and `last` is finite.

    By the sum of the row, which is read at the speed of memory and needs none of its own: it is finite only if every
    value is. (A row of finite values whose sum overflows, 1e34 on average, is not hidden states either.)
    """
    return torch.stack([hidden.aux.sum(-1), hidden.last.sum(-1)]).isfinite()


def check_finite(finite: Tensor) -> None:
    """Raise SampleError unless all `[2, T]` flags of `finite_rows`, on the CPU, are set."""
    for name, rows in zip(("aux", "last"), finite, strict=True):
        if not rows.all():
            raise SampleError(f"{name} has values that are not finite; try generator.compute_dtype=float32")


def as_bytes(tensor: Tensor) -> memoryview:
    """A writable view of a contiguous CPU tensor's bytes."""
    assert tensor.is_contiguous()
    return tensor.view(torch.uint8).numpy().reshape(-1).data
