"""The optimizer of a draft, as the recipe says."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from models.config.training import TrainingConfig
from models.drafts.base import Draft
from models.muon import MuonAndAdamW, orthogonalised
from models.training.sharding import divided_as


def make_optimizer(draft: Draft, settings: TrainingConfig, dtype: torch.dtype) -> tuple[Optimizer, Sequence[Tensor]]:
    """The optimizer, and the trained parameters in the order of its state.

    `dtype`, the one of the training's arithmetic, is that of Muon's matrix products.
    """
    named = {name: parameter for name, parameter in draft.named_parameters() if parameter.requires_grad}
    trained = list(named.values())
    rate, decay = settings.learning_rate, settings.weight_decay
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(trained, rate, settings.betas, weight_decay=decay, fused=True), trained
    matrices = [parameter for name, parameter in named.items() if _is_matrix(draft, name, parameter)]
    others = [parameter for name, parameter in named.items() if not _is_matrix(draft, name, parameter)]

    def orthogonalise(update: Tensor) -> Tensor:
        whole = update.full_tensor() if isinstance(update, DTensor) else update
        return divided_as(update, orthogonalised(whole, dtype))

    return MuonAndAdamW(matrices, others, rate, settings.betas, decay, orthogonalise), matrices + others


def _is_matrix(draft: Draft, name: str, parameter: Tensor) -> bool:
    """Whether rows and columns are directions of hidden states: not of tables with a row for each token."""
    return parameter.ndim >= 2 and min(parameter.shape[-2:]) > 1 and name not in draft.token_tables
