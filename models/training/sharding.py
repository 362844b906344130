"""How ranks share a draft: every rank has all of it (DDP), or a part of it (FSDP2).

Checkpoints hold whole tensors either way, so a run can resume with another number of ranks, sharded or not.
"""

from collections.abc import Sequence
from typing import Any

from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from models.checkpoint import each_tensor
from models.config.training import TrainingConfig
from models.drafts.base import Draft


def strategy(settings: TrainingConfig, world: int) -> Strategy | str:
    """Lightning's strategy; a single rank shards nothing."""
    if world == 1:
        return "auto"
    if settings.sharded:
        return ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1)
    # The buffers are the target's tables, equal on all ranks from the start: hundreds of megabytes at every step.
    # Gradients are views of what is summed up: DDP would keep a second copy of them.
    return DDPStrategy(broadcast_buffers=False, gradient_as_bucket_view=True)


def shard(draft: Draft, mesh: DeviceMesh) -> None:
    """Divide every parameter among the ranks of a one-dimensional mesh; they meet for `loss` and `no_loss` only.

    A draft is about one layer of its target, so it is gathered as a whole. Buffers (the target's tables) stay whole.
    """
    fully_shard(draft, mesh=mesh)
    for method in ("loss", "no_loss"):
        register_fsdp_forward_method(draft, method)


def sync_gradients(draft: Draft, wanted: bool) -> None:
    """Whether the next backward pass reduces the gradients of a sharded draft. Lightning tells DDP."""
    if isinstance(next(draft.parameters()), DTensor):
        draft.set_requires_gradient_sync(wanted)  # type: ignore[operator]


def whole(value: Any, wanted: bool) -> Any:
    """Nested dicts, lists and tuples with every divided tensor put together in the host's memory, one at a time: a GPU
    has no room for all of them. A collective operation of all ranks; those with `wanted=False` keep their parts."""

    def put_together(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        together = tensor.full_tensor()
        return together.cpu() if wanted else tensor

    return each_tensor(put_together, value)


def divided_as(like: Tensor, value: Tensor) -> Tensor:
    """A whole tensor, which every rank has, divided among the ranks as `like` is."""
    if not isinstance(like, DTensor):
        return value
    placed = value.to(like.device)
    return distribute_tensor(placed, like.device_mesh, like.placements, src_data_rank=None)


def optimizer_state_as(parameters: Sequence[Tensor], state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's whole state, by the number of each parameter, divided as the parameters are."""
    divided = {
        number: {
            name: divided_as(parameters[number], value) if value.shape == parameters[number].shape else value
            for name, value in of_one.items()
        }
        for number, of_one in state["state"].items()
    }
    return {**state, "state": divided}


def part(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
