"""Settings of DFlash 2 (Inco AI and z-lab, 2026), as SGLang 0.5.23 and vLLM 0.33 read its checkpoints."""

from typing import ClassVar, Literal

from pydantic import Field

from infra.planner.shapes import Kept
from models.config.blocks import BlockConfig


class DFlash2Config(BlockConfig):
    """DFlash with convolutions inside the block, and a selector that walks over each position's likeliest tokens."""

    title: ClassVar[str] = "DFlash 2"
    training_only: ClassVar[frozenset[str]] = BlockConfig.training_only | {"selector_weight"}
    engine_dtype: ClassVar[str | None] = "bfloat16"
    engine_proposals: ClassVar[Literal["greedy", "drawn"]] = "drawn"

    method: Literal["dflash2"] = Field(default="dflash2", description="Draft method.")
    block_size: int = Field(default=8, ge=2, le=17, description="Positions per block: the last known token and masks.")
    decay_gamma: float = Field(
        default=4.0,
        gt=0,
        le=10_000,
        description="Proposal k weighs exp(-(k - 1) / decay_gamma): 4 for a block of 8, 7 for 16.",
    )
    conv_kernel_size: int = Field(
        default=2,
        ge=1,
        le=64,
        description="Positions that a convolution reads: its own and those before in its block.",
    )
    conv_group_size: int = Field(
        default=16, ge=1, le=4096, description="Channels that share a kernel; must divide the target's hidden size."
    )
    selector_rank: int = Field(default=256, ge=1, le=2**16, description="Rank of the score of two tokens in a row.")
    selector_top_k: int = Field(
        default=16, ge=1, le=1024, description="Likeliest tokens of each position among which the selector chooses."
    )
    selector_weight: float = Field(
        default=1.0, gt=0, le=1000, description="Weight of the cross-entropy among these tokens in the loss."
    )

    @property
    def anchor_first(self) -> bool:
        return False

    def head_parameters(self, hidden: int, target_vocabulary: int) -> int:
        kernels = len(self.layer_types) * 2 * 2 * self.conv_kernel_size * hidden
        return kernels + self.head_row_parameters(hidden) + 2 * target_vocabulary * self.selector_rank

    def head_row_parameters(self, hidden: int) -> int:
        projections = 2 * self.conv_kernel_size * (hidden // self.conv_group_size) * hidden
        return len(self.layer_types) * 2 * projections + hidden * self.selector_rank

    def _kept(self, hidden: int, aux_count: int, item: int) -> Kept:
        """Of each convolution, which stands before and after a sublayer, what its taps read, and its kernels."""
        kept, layers = super()._kept(hidden, aux_count, item), len(self.layer_types)
        kernels = 2 * self.conv_kernel_size * (hidden // self.conv_group_size)
        of_layer = 2 * (2 * self.conv_kernel_size * hidden + kernels) * item
        return kept.model_copy(update={"row": kept.row + layers * of_layer})
