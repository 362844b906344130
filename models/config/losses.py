"""Which loss a draft is trained by. Part of a method's configuration; reaches pydantic only."""

from typing import Literal

from pydantic import Field

from infra.config import StrictConfig


class LossChoice(StrictConfig):
    """For methods that learn the target's distribution."""

    loss: Literal["kl", "lk_alpha", "lk_lambda"] = Field(
        default="kl",
        description="`kl`: soft cross-entropy. `lk_alpha`: -log of the acceptance rate. `lk_lambda`: from KL towards "
        "1 - acceptance rate, position by position, as acceptance grows.",
    )
    lk_decay: float = Field(
        default=3.0,
        ge=0,
        le=10_000,
        description="`lk_lambda`: KL has weight exp(-lk_decay x acceptance rate); 0 is KL alone.",
    )


LOSS_FIELDS = frozenset(LossChoice.model_fields)
