"""How the draft is optimized."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TrainingConfig(BaseModel):
    """Optimizer, schedule, steps."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    epochs: int = Field(1, ge=1)
    samples_per_step: int = Field(8, ge=1, description="Samples of one optimizer step, over all ranks.")
    micro_batches: int = Field(1, ge=1, description="Gradient accumulation: micro-batches per rank and step.")
    max_steps: int | None = Field(None, ge=1)
    learning_rate: float = Field(1e-3, gt=0)
    min_learning_rate_share: float = Field(0.1, ge=0, le=1, description="Where the cosine schedule ends.")
    warmup_steps: int = Field(10, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float = Field(1.0, gt=0)
    ema_decay: float = Field(0.99, ge=0, lt=1, description="Weights of the export are averaged with this decay; 0: off.")
    precision: Literal["float32", "bfloat16"] = Field("bfloat16", description="Autocast; master weights are float32.")
    order: Literal["strict", "any"] = Field("strict", description="`strict`: same plan on every run of the same seed.")
    ranks: int = Field(1, ge=1, description="Trainer ranks (torchrun processes).")
    prefetch_steps: int = Field(2, ge=0, description="Steps fetched ahead of the one that trains.")
    loss_chunk_tokens: int = Field(1024, ge=1, description="Positions whose logits are alive at once.")
    checkpoint_steps: int = Field(200, ge=1, description="Steps between checkpoints.")
    log_steps: int = Field(10, ge=1, description="Steps between progress lines and logged metrics.")
    threads: int | None = Field(None, ge=1, description="CPU threads per rank; default: its share of the cores.")
    stall_s: float = Field(600.0, gt=0, description="Give up after waiting this long for the next step's samples.")
