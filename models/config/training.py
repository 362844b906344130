"""How the draft is optimized."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from infra.config import Address, StrictConfig
from infra.refusal import Refusal

Beta = Annotated[float, Field(ge=0, lt=1)]
Version = Annotated[int, Field(ge=1, le=2**31 - 1)]


class TrainingConfig(StrictConfig):
    """Optimizer, schedule, steps."""

    start_from: Literal["champion"] | Version | Address | None = Field(
        default=None,
        description="Begin with the weights and the draft vocabulary of a registered version: its number, or "
        "`champion` (a new draft where there is none). Or of a published draft: a folder, or OWNER/NAME[@REVISION] of "
        "the Hub, in SGLang's layout or that of `speculators`. Default: a new draft.",
    )
    epochs: int = Field(default=1, ge=1, le=10_000, description="Passes over the training samples.")
    samples_per_step: int = Field(
        default=8, ge=1, le=65_536, description="Samples of one optimizer step, over all ranks."
    )
    micro_batches: int = Field(
        default=1, ge=1, le=65_536, description="Gradient accumulation: micro-batches per rank and step."
    )
    max_steps: int | None = Field(
        default=None, ge=1, le=1_000_000_000, description="Most optimizer steps of a run; default: all epochs."
    )
    learning_rate: float = Field(
        default=1e-3, gt=0, le=10, description="Peak learning rate, reached at the end of the warm-up."
    )
    min_learning_rate_share: float = Field(default=0.1, ge=0, le=1, description="Where the cosine schedule ends.")
    warmup_steps: int = Field(
        default=10, ge=0, le=1_000_000_000, description="Optimizer steps of the linear warm-up; 0: none."
    )
    weight_decay: float = Field(default=0.0, ge=0, le=100, description="AdamW's weight decay; 0: off.")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), description="AdamW's two moment decays, each in [0, 1).")
    clip_norm: float = Field(
        default=1.0, gt=0, le=1_000_000, description="Gradients are clipped to this global L2 norm."
    )
    ema_decay: float = Field(
        default=0.99, ge=0, lt=1, description="Weights of the export are averaged with this decay; 0: off."
    )
    precision: Literal["float32", "bfloat16"] = Field(
        default="bfloat16", description="Autocast; master weights are float32."
    )
    order: Literal["strict", "any"] = Field(
        default="strict", description="`strict`: same plan on every run of the same seed."
    )
    ranks: int = Field(default=1, ge=1, le=16_384, description="Trainer ranks: processes of one machine, one per GPU.")
    sharded: bool = Field(
        default=False,
        description="Divide weights, gradients and optimizer state among the ranks (FSDP2) instead of keeping all of "
        "them on each (DDP): less memory, more traffic.",
    )
    context_parallel_size: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Ranks that share every sample, each fetching and computing a part of its positions: for samples "
        "longer than one GPU holds. `ranks` is a multiple of it. Not with DFlash.",
    )
    prefetch_steps: int = Field(default=2, ge=0, le=1024, description="Steps fetched ahead of the one that trains.")
    out_of_vocabulary: Literal["argmax", "text"] = Field(
        default="argmax",
        description="Positions that the draft vocabulary cannot express are left out of the loss, judged by the "
        "target's argmax over its whole vocabulary, or (cheaper, equal on regenerated text) by the text's next token.",
    )
    recompute: bool = Field(
        default=False,
        description="Compute inner activations of EAGLE-3's layer again in the backward pass: for samples so long that "
        "they do not fit otherwise, at about a third more arithmetic of the layer.",
    )
    loss_chunk_tokens: int = Field(default=256, ge=1, le=2**24, description="Positions whose logits are alive at once.")
    checkpoint_steps: int = Field(default=200, ge=1, le=1_000_000_000, description="Steps between checkpoints.")
    keep_checkpoints: int = Field(default=2, ge=1, le=10_000, description="Older checkpoint folders are removed.")
    log_steps: int = Field(
        default=10, ge=1, le=1_000_000_000, description="Steps between progress lines and logged metrics."
    )
    heldout_steps: int = Field(
        default=100,
        ge=0,
        le=1_000_000_000,
        description="Steps between measurements of acceptance on held-out prompts, by the simulated walk; 0: none.",
    )
    heldout_prompts: int = Field(
        default=16,
        ge=1,
        le=100_000,
        description="How many of the benchmark's prompts that is; the target continues them once.",
    )
    threads: int | None = Field(default=None, ge=1, le=4096, description="CPU threads per rank; default: all cores.")
    stall_s: float = Field(
        default=600.0, gt=0, le=1_000_000, description="Give up after waiting this long for the next step's samples."
    )

    @model_validator(mode="after")
    def _whole_groups(self) -> Self:
        if self.ranks % self.context_parallel_size:
            raise Refusal(
                f"ranks {self.ranks} is no multiple of context_parallel_size {self.context_parallel_size}: every "
                "sample is shared by that many ranks, so change one of the two"
            )
        return self

    @property
    def data_parallel_size(self) -> int:
        """Groups of ranks that train samples of their own; a group is one rank unless ranks share samples."""
        return self.ranks // self.context_parallel_size

    def total_steps(self, train_samples: int) -> int:
        """Optimizer steps of the whole run; the last step of an epoch may be short."""
        whole = -(-train_samples // self.samples_per_step) * self.epochs
        return whole if self.max_steps is None else min(whole, self.max_steps)
