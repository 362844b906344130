"""What the configuration of every draft method offers. Imported wherever a recipe is; reaches pydantic only."""

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from infra.config import StrictConfig
from infra.planner.shapes import DraftShape, Precision, TargetShape
from infra.refusal import Refusal


class MethodConfig(StrictConfig):
    """A method's own knobs are the fields of its subclass, which also has `method: Literal[<its folder>]`."""

    title: ClassVar[str]
    """The method's name, as reports write it."""
    training_only: ClassVar[frozenset[str]] = frozenset()
    """Fields that say how a draft is trained, not what it is: a warm start may change them."""

    shareable: ClassVar[bool] = True
    """Whether ranks can share a sample in training (`training.context_parallel_size`)."""

    adaptive: ClassVar[bool] = False
    """Whether SGLang can change such a draft's lookahead while it serves (`--speculative-adaptive`)."""

    def vocabulary_size(self, target_vocab_size: int) -> int:
        """Tokens of the draft vocabulary, for a target that knows so many."""
        return target_vocab_size

    def shape(self, target: TargetShape, aux_count: int, precision: Precision) -> DraftShape:
        """What the planner has to know of a draft for `target` that reads `aux_count` of its layers.

        `precision` is that of the arithmetic; weights are float32.
        """
        raise NotImplementedError

    def engine_arguments(self, lookahead: int) -> list[str]:
        """What SGLang's command line says of a draft of this method that proposes `lookahead` tokens per step.

        Asked only where the draft's `engine_config` is not None.
        """
        raise NotImplementedError

    def lookaheads(self, most: int) -> tuple[int, ...]:
        """Proposals per step, up to `most`, that such a draft can be served with: ascending, no draft (0) first."""
        return tuple(range(most + 1))


class LayerShape(MethodConfig):
    """Of a method whose layers are decoder layers, as targets have them."""

    num_heads: int = Field(ge=1, le=4096)
    num_kv_heads: int = Field(ge=1, le=4096)
    head_dim: int = Field(ge=8, le=4096)
    intermediate_size: int = Field(ge=8, le=2**22)
    rope_theta: float = Field(default=10_000.0, gt=0, le=1e12)
    rms_norm_eps: float = Field(default=1e-6, gt=0, le=1)

    @model_validator(mode="after")
    def _heads_are_shared_evenly(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise Refusal(
                f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}: key-value heads are "
                "shared by equal groups"
            )
        return self

    def engine_layers(self, hidden_size: int, vocab_size: int, layers: int) -> dict[str, Any]:
        """Such layers in Hugging Face's words; older versions read `rope_theta`, newer ones `rope_parameters`."""
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
    """Of a method that may propose a part of the target's tokens only."""

    vocab_size: int | None = Field(
        default=32_000,
        ge=16,
        le=2**24,
        description="Draft vocabulary: the target's most frequent tokens; null: all of them.",
    )

    def vocabulary_size(self, target_vocab_size: int) -> int:
        return target_vocab_size if self.vocab_size is None else self.vocab_size


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
