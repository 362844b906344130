"""Settings of DFlash (arXiv 2602.06036), with D-PACE's position weights (arXiv 2605.18810)."""

from typing import ClassVar, Literal

from pydantic import Field

from models.config.blocks import BlockConfig


class DFlashConfig(BlockConfig):
    """A block draft whose proposals do not see each other's tokens."""

    title: ClassVar[str] = "DFlash"
    training_only: ClassVar[frozenset[str]] = BlockConfig.training_only | {"position_weights", "dpace_alpha"}
    # SGLang hands over the block's embeddings in bfloat16 (0.5.23, model_executor/model_runner.py,
    # `_extend_forward_kwargs`), and the target's features as they are.
    engine_dtype: ClassVar[str | None] = "bfloat16"

    method: Literal["dflash"] = Field(default="dflash", description="Draft method.")
    sample_from_anchor: bool = Field(
        default=False,
        description="The known token's row proposes the next token, and every row the one after its own position. "
        "False: a mask's row proposes the token at its own position, as all engines read a DFlash draft.",
    )
    position_weights: Literal["decay", "dpace"] = Field(
        default="decay",
        description="Loss weight of proposal k. `decay`: by decay_gamma. `dpace`: what it adds to the accepted length "
        "of the current draft.",
    )
    dpace_alpha: float = Field(default=0.5, gt=0, le=1, description="Smoothing of D-PACE's confidences; 1: off.")

    @property
    def anchor_first(self) -> bool:
        return self.sample_from_anchor
