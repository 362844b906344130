"""Base classes of the draft methods' settings."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from infra.config import Count, StrictConfig
from infra.planner.shapes import DraftShape, Precision, TargetShape
from infra.refusal import Refusal
from models.config.rope import RopeScaling

LayerType = Literal["full_attention", "sliding_attention"]


class MethodConfig(StrictConfig):
    """A subclass per method adds the method's settings and `method: Literal[<its folder>]`."""

    title: ClassVar[str]
    """The method's name in reports."""
    training_only: ClassVar[frozenset[str]] = frozenset()
    """Fields that affect training but not the model: a warm start may change them."""
    shareable: ClassVar[bool] = True
    """Whether ranks can share a sample in training (`training.context_parallel_size`)."""
    recomputes: ClassVar[bool] = False
    """Whether their layers can compute activations again in the backward pass (`training.recompute`)."""
    reads_layers: ClassVar[bool] = True
    """Whether such drafts read outputs of target layers (`target.aux_layer_ids`); otherwise the target's last hidden
    state, after the final norm."""
    reads_embeddings: ClassVar[bool] = False
    """Whether such drafts read the embeddings of a context's tokens; the target's table has none of an image's."""
    adaptive: ClassVar[bool] = False
    """Whether SGLang can change the lookahead of such a draft while serving (`--speculative-adaptive`)."""
    engine_dtype: ClassVar[str | None] = None
    """The only data type in which SGLang serves such drafts; None: every."""

    engine_proposals: ClassVar[Literal["greedy", "drawn"]] = "greedy"
    """How SGLang proposes for sampled text by default; see `BenchmarkConfig.sampled_proposals`."""

    @property
    def confident(self) -> bool:
        """Whether such drafts say how likely each of their proposals is to be accepted."""
        return False

    @property
    def obstacle_to_images(self) -> str:
        """Why a draft that reads embeddings cannot read those of images, with the remedy; empty if it can."""
        return ""

    @property
    def needs_mass(self) -> bool:
        """Whether the loss asks for the draft vocabulary's share of the target's probability."""
        return False

    def vocabulary_size(self, target_vocab_size: int) -> int:
        """Size of the draft vocabulary for a target with `target_vocab_size` tokens."""
        return target_vocab_size

    def shape(self, target: TargetShape, aux_count: int, precision: Precision) -> DraftShape:
        """The planner's view of a draft that reads `aux_count` layers of `target`.

        `precision` is that of the arithmetic; weights are float32.
        """
        raise NotImplementedError

    def engine_arguments(self, lookahead: int) -> list[str]:
        """SGLang's command-line arguments for a draft that proposes `lookahead` tokens per step.

        Only called for drafts whose `engine_config` is not None.
        """
        raise NotImplementedError

    def tree_arguments(self, depth: int, topk: int, tokens: int) -> list[str]:
        """SGLang's arguments for dynamic trees (see `TreeGoodput`), for drafts that are a `BranchingSource`."""
        raise NotImplementedError

    def dtype_arguments(self, dtype: str) -> list[str]:
        """SGLang's argument for target and draft where the `dtype` that it would serve them in does not work."""
        return [] if self.engine_dtype in (None, dtype) else ["--dtype", self.engine_dtype]

    def layers_read(self, captured: tuple[int, ...]) -> tuple[int, ...]:
        """Those of the `captured` target layers that such a draft reads."""
        return captured

    def lookaheads(self, most: int) -> tuple[int, ...]:
        """Lookaheads up to `most` that such a draft can be served with, ascending from 0 (no draft)."""
        return tuple(range(most + 1))


class LayerShape(MethodConfig):
    """Settings of methods that are built of decoder layers: what a layer is built from."""

    num_heads: Count = Field(description="Query heads per layer. Default in a recipe file: by the target.")
    num_kv_heads: Count = Field(
        description="Key-value heads per layer; must divide num_heads. Default in a recipe file: by the target."
    )
    head_dim: int = Field(
        ge=8, le=4096, description="Size of one attention head. Default in a recipe file: by the target."
    )
    intermediate_size: int = Field(
        ge=8,
        le=2**22,
        description="Hidden size of the feed-forward network. Default in a recipe file: by the target.",
    )
    rope_theta: float = Field(
        default=10_000.0,
        gt=0,
        le=1e12,
        description="Base of the rotary position embedding. Default in a recipe file: the target's.",
    )
    rope_scaling: RopeScaling | None = Field(
        default=None,
        description="Scaling of that embedding; null: none. Default in a recipe file: the target's, or none if the "
        "recipe gives all sizes and `rope_theta`.",
    )
    partial_rotary_factor: float = Field(
        default=1.0, gt=0, le=1, description="Share of each head that is rotated; the rest of it has no position."
    )
    attention_bias: bool = Field(default=False, description="Biases in the attention's four projections.")
    rms_norm_eps: float = Field(default=1e-6, gt=0, le=1, description="Epsilon of the RMS norms.")
    layer_types: tuple[LayerType, ...] = Field(
        default=("full_attention",),
        min_length=1,
        max_length=256,
        description="One per layer. `full_attention` sees everything before; `sliding_attention` the last "
        "`sliding_window` positions.",
    )
    sliding_window: int | None = Field(
        default=None, ge=2, le=2**24, description="Positions that a sliding layer sees, including its own."
    )

    @property
    def rotary_dim(self) -> int:
        """Rotated part of a head."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Attention window of every layer; None: no window."""
        return tuple(self.sliding_window if kind == "sliding_attention" else None for kind in self.layer_types)

    @property
    def widths(self) -> tuple[int, int]:
        """Of all queries, and of all keys, of a layer."""
        return self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim

    @model_validator(mode="after")
    def _rotates_and_slides(self) -> Self:
        if self.rotary_dim < 2 or self.rotary_dim % 2:
            raise Refusal(
                f"head_dim {self.head_dim} x partial_rotary_factor {self.partial_rotary_factor:g} is "
                f"{self.rotary_dim}: pairs are rotated, so choose them for an even number"
            )
        if "sliding_attention" in self.layer_types and self.sliding_window is None:
            raise Refusal("draft.layer_types has sliding_attention layers: set draft.sliding_window")
        return self

    @model_validator(mode="after")
    def _heads_are_shared_evenly(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise Refusal(
                f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}: key-value heads are "
                "shared by equal groups"
            )
        return self

    def engine_layers(self, hidden_size: int, vocab_size: int) -> dict[str, Any]:
        """Hugging Face settings of the layers, without those that the target decides.

        Older versions read `rope_theta`, newer ones `rope_parameters`.
        """
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.rope_theta}
        partial = {} if self.partial_rotary_factor == 1 else {"partial_rotary_factor": self.partial_rotary_factor}
        if self.rope_scaling is not None:
            rope |= self.rope_scaling.parameters()
        return {
            "hidden_size": hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": len(self.layer_types),
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_parameters": rope | partial,
            **partial,
            "vocab_size": vocab_size,
            "tie_word_embeddings": False,
            "attention_bias": self.attention_bias,
        }


class VocabularyChoice(MethodConfig):
    """Settings of methods that may propose only a part of the target's tokens."""

    vocab_size: int | None = Field(
        default=32_000,
        ge=16,
        le=2**24,
        description="Size of the draft vocabulary, the most frequent tokens of the supervised text; null: all tokens.",
    )

    def vocabulary_size(self, target_vocab_size: int) -> int:
        return target_vocab_size if self.vocab_size is None else self.vocab_size


class LossChoice(StrictConfig):
    """Settings of methods that learn the target's distribution."""

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

    @property
    def needs_mass(self) -> bool:
        """The acceptance rate is that of the target's true probabilities."""
        return self.loss != "kl"


class UnrolledSteps(StrictConfig):
    """Settings of methods that train along several steps of the draft (training-time test, arXiv 2503.01840)."""

    engine_algorithm: ClassVar[str]
    """SGLang's name of the method."""
    recomputes: ClassVar[bool] = True

    ttt_steps: int = Field(default=7, ge=1, le=16, description="Unrolled steps of the training-time test.")
    ttt_decay: float = Field(default=0.8, gt=0, le=1, description="Loss weight of step j is ttt_decay ** j.")
    ttt_weights: tuple[Annotated[float, Field(ge=0, le=1_000_000)], ...] | None = Field(
        default=None,
        description="Loss weight of each step; default: by ttt_decay, or by the objective that has its own.",
    )

    @model_validator(mode="after")
    def _one_weight_for_each_step(self) -> Self:
        if self.ttt_weights is not None and (len(self.ttt_weights) != self.ttt_steps or not any(self.ttt_weights)):
            raise Refusal(
                f"ttt_weights {list(self.ttt_weights)}: give one weight for each of the {self.ttt_steps} ttt_steps, "
                "not all of them 0"
            )
        return self

    @property
    def step_weights(self) -> tuple[float, ...]:
        """Loss weight of each step."""
        return self.ttt_weights or tuple(self.ttt_decay**step for step in range(self.ttt_steps))

    def engine_arguments(self, lookahead: int) -> list[str]:
        return self.tree_arguments(lookahead, 1, lookahead)

    def tree_arguments(self, depth: int, topk: int, tokens: int) -> list[str]:
        """See `MethodConfig.tree_arguments`. SGLang counts the last known token among the draft tokens."""
        command = ["--speculative-algorithm", self.engine_algorithm, "--speculative-eagle-topk", str(topk)]
        return [*command, "--speculative-num-steps", str(depth), "--speculative-num-draft-tokens", str(tokens + 1)]


LOSS_FIELDS = frozenset(LossChoice.model_fields)
STEP_FIELDS = frozenset(UnrolledSteps.model_fields)
