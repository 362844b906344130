"""How the draft is optimized."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from infra.config import Address, AtLeastOne, Count, Share, StrictConfig, Tokens
from infra.refusal import Refusal

Beta = Annotated[float, Field(ge=0, lt=1)]
Steps = Annotated[int, Field(ge=0, le=1_000_000_000)]
Version = Annotated[int, Field(ge=1, le=2**31 - 1)]


class TrainingConfig(StrictConfig):
    """Optimizer, schedule, steps."""

    start_from: Literal["champion", "furthest"] | Version | Address | None = Field(
        default=None,
        description="Warm start from a registered version (its number, `champion`, or `furthest`: the newest version "
        "while it waits for approval, or its benchmark finds it ahead of the champion by too little to be sure, else "
        "the champion; a new draft where there is none), or from a published draft (a folder, or "
        "OWNER/NAME[@REVISION] of the Hub, in the layout of SGLang or `speculators`), with its vocabulary. Default: a "
        "new draft.",
    )
    epochs: int = Field(default=1, ge=1, le=10_000, description="Passes over the training samples.")
    samples_per_step: int = Field(default=8, ge=1, le=65_536, description="Samples per optimizer step, over all ranks.")
    micro_batches: int = Field(
        default=1, ge=1, le=65_536, description="Micro-batches per rank and optimizer step (gradient accumulation)."
    )
    max_steps: AtLeastOne | None = Field(default=None, description="Most optimizer steps; default: all epochs.")
    optimizer: Literal["adamw", "muon"] = Field(
        default="adamw",
        description="`muon`: Muon for the matrices of the draft's layers, AdamW for all other weights. Steps "
        "take longer, the more so the fewer tokens they have. Compare both on your target.",
    )
    learning_rate: float = Field(default=1e-3, gt=0, le=10, description="Peak learning rate, after the warm-up.")
    min_learning_rate_share: Share = Field(default=0.1, description="Final learning rate as a share of the peak.")
    warmup_steps: Steps = Field(default=10, description="Steps of the linear warm-up; 0: none.")
    weight_decay: float = Field(default=0.0, ge=0, le=100, description="Weight decay, times the learning rate; 0: off.")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.95), description="AdamW's two moment decays, each in [0, 1).")
    clip_norm: float = Field(default=1.0, gt=0, le=1_000_000, description="Maximum L2 norm of all gradients.")
    ema_decay: float = Field(default=0.99, ge=0, lt=1, description="Decay of the exported moving average; 0: off.")
    precision: Literal["float32", "bfloat16"] | None = Field(
        default=None,
        description="Data type of the arithmetic (autocast); master weights are float32. Default: bfloat16 with "
        "`pools.training_gpus`, otherwise by the processor, as for the generator.",
    )
    order: Literal["strict", "any"] = Field(
        default="strict",
        description="`strict`: runs with the same seed train the same samples per step. `any`: whatever is ready.",
    )
    ranks: int = Field(
        default=1,
        ge=1,
        le=16_384,
        description="Trainer ranks: one process per GPU. A recipe file may leave it to `pools.training_gpus`.",
    )
    sharded: bool = Field(
        default=False,
        description="Shard weights, gradients and optimizer state over the ranks (FSDP2) instead of replicating them "
        "(DDP): less memory, more traffic.",
    )
    context_parallel_size: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Ranks that share each sample, each with a part of its positions, for samples too long for one "
        "GPU. `ranks` must be a multiple of it; not with drafts of blocks or MTP layers.",
    )
    prefetch_steps: int = Field(default=2, ge=0, le=1024, description="Steps fetched ahead of the one that trains.")
    out_of_vocabulary: Literal["argmax", "text"] = Field(
        default="argmax",
        description="How positions outside the draft vocabulary are recognized, to leave them out of the loss: by the "
        "target's argmax over its whole vocabulary, which generators send with each sample (4 bytes per token), or by "
        "the text's next token (equal on regenerated text; always so with generator.engine=serving).",
    )
    recompute: bool = Field(
        default=False,
        description="Recompute inner activations of the layers of EAGLE-3 and MTP in the backward pass, for samples "
        "that do not fit otherwise; costs about a third more arithmetic of the layer. Other methods refuse it.",
    )
    loss_chunk_tokens: Tokens | None = Field(
        default=None,
        description="Positions whose logits are in memory at once. Default: 256 on a CPU; on a GPU as many as have 512 "
        "MiB of draft logits.",
    )
    checkpoint_steps: AtLeastOne = Field(default=200, description="Steps between checkpoints.")
    keep_checkpoints: int = Field(default=2, ge=1, le=10_000, description="Checkpoints that are kept, the newest.")
    log_steps: AtLeastOne = Field(default=10, description="Steps between progress lines and logged metrics.")
    heldout_steps: Steps = Field(
        default=100, description="Steps between measurements of simulated acceptance on held-out prompts; 0: none."
    )
    heldout_prompts: int = Field(
        default=16, ge=1, le=100_000, description="Held-out prompts of each measurement, continued once by the target."
    )
    threads: Count | None = Field(
        default=None,
        description="CPU threads per rank. Default: an equal share of the cores, or of half of them where inference "
        "has no GPUs either.",
    )
    stall_s: float = Field(
        default=600.0,
        gt=0,
        le=1_000_000,
        description="Seconds to wait for the next step's samples before giving up; with generator.engine=serving "
        "always 30 days.",
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
        """Number of groups of ranks that share their samples; a group is one rank with context_parallel_size 1."""
        return self.ranks // self.context_parallel_size

    def total_steps(self, train_samples: int) -> int:
        """Optimizer steps of the whole run; the last step of an epoch may be short."""
        whole = -(-train_samples // self.samples_per_step) * self.epochs
        return whole if self.max_steps is None else min(whole, self.max_steps)
