"""What the configuration of every draft method offers. Imported wherever a recipe is; reaches pydantic only."""

from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field

from infra.planner.shapes import DraftShape, Precision, TargetShape


class MethodConfig(BaseModel):
    """A method's own knobs are the fields of its subclass, which also has `method: Literal[<its folder>]`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

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


class VocabularyChoice(MethodConfig):
    """Of a method that may propose a part of the target's tokens only."""

    vocab_size: int | None = Field(
        default=32_000, ge=16, description="Draft vocabulary: the target's most frequent tokens; null: all of them."
    )

    def vocabulary_size(self, target_vocab_size: int) -> int:
        return target_vocab_size if self.vocab_size is None else self.vocab_size
