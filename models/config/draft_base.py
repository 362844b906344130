"""Base classes of the draft methods' settings."""

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from infra.config import Count, StrictConfig
from infra.planner.shapes import DraftShape, Precision, TargetShape
from infra.refusal import Refusal


class MethodConfig(StrictConfig):
    """A subclass per method adds the method's settings and `method: Literal[<its folder>]`."""

    title: ClassVar[str]
    """The method's name in reports."""
    training_only: ClassVar[frozenset[str]] = frozenset()
    """Fields that affect training but not the model: a warm start may change them."""
    shareable: ClassVar[bool] = True
    """Whether ranks can share a sample in training (`training.context_parallel_size`)."""
    adaptive: ClassVar[bool] = False
    """Whether SGLang can change the lookahead of such a draft while serving (`--speculative-adaptive`)."""

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

    def lookaheads(self, most: int) -> tuple[int, ...]:
        """Lookaheads up to `most` that such a draft can be served with, ascending from 0 (no draft)."""
        return tuple(range(most + 1))


class LayerShape(MethodConfig):
    """Settings of methods that are built of decoder layers."""

    num_heads: Count = Field(description="Query heads per layer.")
    num_kv_heads: Count = Field(description="Key-value heads per layer; must divide num_heads.")
    head_dim: int = Field(ge=8, le=4096, description="Size of one attention head.")
    intermediate_size: int = Field(ge=8, le=2**22, description="Hidden size of the feed-forward network.")
    rope_theta: float = Field(default=10_000.0, gt=0, le=1e12, description="Base of the rotary position embedding.")
    rms_norm_eps: float = Field(default=1e-6, gt=0, le=1, description="Epsilon of the RMS norms.")

    @model_validator(mode="after")
    def _heads_are_shared_evenly(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise Refusal(
                f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}: key-value heads are "
                "shared by equal groups"
            )
        return self

    def engine_layers(self, hidden_size: int, vocab_size: int, layers: int) -> dict[str, Any]:
        """Hugging Face settings of the layers; older versions read `rope_theta`, newer ones `rope_parameters`."""
        return {
            "hidden_size": hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "max_position_embeddings": 131072,
            "vocab_size": vocab_size,
            "tie_word_embeddings": False,
            "attention_bias": False,
            "torch_dtype": "float32",
        }


class VocabularyChoice(MethodConfig):
    """Settings of methods that may propose only a part of the target's tokens."""

    vocab_size: int | None = Field(
        default=32_000,
        ge=16,
        le=2**24,
        description="Size of the draft vocabulary, the most frequent tokens of the target; null: all tokens.",
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


LOSS_FIELDS = frozenset(LossChoice.model_fields)
