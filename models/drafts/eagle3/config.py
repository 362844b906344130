"""Knobs of EAGLE-3 (arXiv 2503.01840)."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class Eagle3Config(BaseModel):
    """One decoder layer over the next token's embedding and the fused target features."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Literal["eagle3"] = "eagle3"
    vocab_size: int = Field(default=32_000, ge=16, description="Draft vocabulary: the target's most frequent tokens.")
    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=8)
    intermediate_size: int = Field(ge=8)
    rope_theta: float = Field(default=10_000.0, gt=0)
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    fc_norm: bool = Field(
        default=False,
        description="RMS norm per target feature before fusion. Needed where the residual stream grows a lot (Gemma).",
    )
    norm_output: bool = Field(
        default=False, description="Feed the normed output back instead of the raw one (EAGLE-3.1)."
    )
    ttt_steps: int = Field(default=7, ge=1, le=16, description="Unrolled training-time-test steps.")
    ttt_decay: float = Field(default=0.8, gt=0, le=1, description="Weight of step j is ttt_decay ** j.")
