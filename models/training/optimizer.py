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
    trained = [parameter for parameter in draft.parameters() if parameter.requires_grad]
    rate, decay = settings.learning_rate, settings.weight_decay
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(trained, rate, settings.betas, weight_decay=decay, fused=True), trained
    matrices = [parameter for parameter in trained if is_matrix(draft, parameter)]
    others = [parameter for parameter in trained if not is_matrix(draft, parameter)]

    def orthogonalise(update: Tensor) -> Tensor:
        whole = update.full_tensor() if isinstance(update, DTensor) else update
        return divided_as(update, orthogonalised(whole, dtype))

    return MuonAndAdamW(matrices, others, rate, settings.betas, decay, orthogonalise), matrices + others


def is_matrix(draft: Draft, parameter: Tensor) -> bool:
    """Whether rows and columns are directions of hidden states: not of tables with a row for each token."""
    tokens = {len(draft.vocabulary), draft.vocabulary.target_size}
    return parameter.ndim >= 2 and min(parameter.shape[-2:]) > 1 and parameter.shape[-2] not in tokens
