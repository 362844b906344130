"""The draft as Lightning trains it: loss, optimizer, schedule, averaged weights."""

import math
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from infra.planner.memory import loss_chunk_tokens
from models.checkpoint import Restored, TrainerState
from models.config.training import TrainingConfig
from models.drafts.base import Draft, DraftLoss, TargetProjection
from models.training.optimizer import make_optimizer
from models.training.sharding import divided_as, optimizer_state_as, part, shard, sync_gradients, whole
from models.training.stream import MicroBatch


class DraftModule(lightning.LightningModule):
    """Trains `draft` against `target`; `resumed` restores optimizer and schedule."""

    def __init__(
        self,
        draft: Draft,
        target: TargetProjection,
        settings: TrainingConfig,
        total_steps: int,
        world: int = 1,
        resumed: Restored | None = None,
    ):
        super().__init__()
        self.draft, self.target, self.settings = draft, target, settings
        draft.recompute = settings.recompute
        self.total_steps, self.world, self.resumed = total_steps, world, resumed
        self.averaged = {
            name: p.detach().clone() if resumed is None else resumed.averaged[name]
            for name, p in draft.named_parameters()
        }
        self.outcome: DraftLoss | None = None
        """Counts of the micro-batch just trained; None where there was nothing to train."""
        self.gradient_norm = torch.zeros(())
        """Scalar, of the step just done and of all ranks' gradients, before clipping."""

    def training_step(self, batch: MicroBatch, _index: int) -> Tensor:
        """The micro-batch's share of the step's loss.

        Lightning divides by the number of micro-batches and DDP by the number of ranks; both are undone here, because
        the loss is already a sum over the step's total of supervised positions.
        """
        sync_gradients(self.draft, batch.last_of_step)
        if batch.samples is None:
            self.outcome = None
            return self.draft.no_loss()
        settings, self.draft.epoch = self.settings, batch.epoch
        self.draft.trained_share = (batch.step - 1) / self.total_steps
        self.outcome = self.draft.loss(batch.samples, self.target, batch.total, self._chunk_tokens)
        return self.outcome.loss * settings.micro_batches * self.world

    @property
    def _chunk_tokens(self) -> int:
        rows = self.target.rows
        by_device = loss_chunk_tokens(self.draft.loss_logits * rows.element_size(), rows.device.type == "cpu")
        return self.settings.loss_chunk_tokens or by_device

    def configure_model(self) -> None:
        """Shard the draft if requested; Lightning may call this twice."""
        mesh = self.device_mesh
        if mesh is None or isinstance(next(self.draft.parameters()), DTensor):
            return
        self.draft.to(self.trainer.strategy.root_device)
        shard(self.draft, mesh["data_parallel"])
        for name, parameter in self.draft.named_parameters():
            self.averaged[name] = divided_as(parameter, self.averaged[name])

    def configure_optimizers(self) -> Any:
        # The weights are on their device now; an average on the host would copy all of them there in every step.
        for name, parameter in self.draft.named_parameters():
            self.averaged[name] = self.averaged[name].to(parameter.device)
        optimizer, parameters = make_optimizer(self.draft, self.settings, self.target.rows.dtype)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._schedule)
        if self.resumed is not None:
            optimizer.load_state_dict(optimizer_state_as(parameters, self.resumed.state["optimizer"]))
            scheduler.load_state_dict(self.resumed.state["scheduler"])
            self.resumed = None  # on a GPU all of it was copied there, and the host would hold it until the end
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def configure_gradient_clipping(
        self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None
    ) -> None:
        """Lightning refuses fused optimizers under autocast for fear of scaled gradients; bfloat16 has no scaling."""
        norm = torch.nn.utils.clip_grad_norm_(self.draft.parameters(), self.settings.clip_norm)
        self.gradient_norm = norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _schedule(self, step: int) -> float:
        """Linear warm-up, then a cosine down to `min_learning_rate_share`."""
        settings = self.settings
        if step < settings.warmup_steps:
            return (step + 1) / settings.warmup_steps
        done = (step - settings.warmup_steps) / max(1, self.total_steps - settings.warmup_steps)
        floor = settings.min_learning_rate_share
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))

    @torch.no_grad()
    def average(self, step: int) -> None:
        """Follow the weights with an exponential moving average that forgets its start quickly."""
        decay = min(self.settings.ema_decay, step / (step + 10))
        weights = {name: part(parameter.detach()) for name, parameter in self.draft.named_parameters()}
        averaged = [part(self.averaged[name]) for name in weights]
        # One kernel for all weights on a GPU; what torch's own optimizers are written with.
        torch._foreach_lerp_(averaged, list(weights.values()), 1 - decay)  # pyright: ignore[reportPrivateImportUsage]

    def transfer_batch_to_device(self, batch: MicroBatch, device: torch.device, dataloader_idx: int) -> MicroBatch:
        return batch.to(device)

    def state(self, counters: dict[str, float], wanted: bool) -> TrainerState:
        """The part of a checkpoint besides the weights; see `whole`."""
        scheduler: Any = self.lr_schedulers()
        optimizer = whole(self.trainer.optimizers[0].state_dict(), wanted)
        return TrainerState(optimizer=optimizer, scheduler=scheduler.state_dict(), counters=counters)
