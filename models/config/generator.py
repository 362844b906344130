"""How generators capture hidden states."""

from typing import Literal, Self

from pydantic import Field, model_validator

from infra.config import StrictConfig
from infra.refusal import Refusal
from infra.sglang.config import SGLangConfig


class GeneratorConfig(StrictConfig):
    """Target prefill and capture."""

    engine: Literal["transformers", "sglang"] = Field(
        default="transformers", description="sglang: a server per generator, in an environment of its own."
    )
    count: int = Field(default=1, ge=1, le=4096, description="Generator processes per run.")
    max_count: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="While inference is the slow side, generators are added up to this number, each on devices of its "
        "own, and removed again. Default: `count`, never more.",
    )
    patience_s: float = Field(
        default=120.0,
        gt=0,
        le=86_400,
        description="One side must be the slow one for so long before generators come or go.",
    )
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    stored_dtype: Literal["float32", "bfloat16"] = Field(
        default="bfloat16", description="Data type of captured hidden states."
    )
    lease_samples: int = Field(default=8, ge=1, le=4096, description="Samples leased per ledger transaction.")
    threads: int | None = Field(
        default=None, ge=1, le=4096, description="CPU threads of one generator; default: all cores."
    )
    sglang: SGLangConfig = SGLangConfig()

    @property
    def in_flight(self) -> int:
        """Samples that one generator captures at the same time."""
        return self.sglang.requests_in_flight if self.engine == "sglang" else 1

    @property
    def slots(self) -> int:
        """Samples that all generators together hold at most: leased, and in the engine."""
        return self.most * (self.lease_samples + self.in_flight)

    @property
    def most(self) -> int:
        """Generators that there may be at the same time."""
        return self.max_count or self.count

    @model_validator(mode="after")
    def _room_for_all(self) -> Self:
        if self.most < self.count:
            raise Refusal(
                f"max_count is {self.max_count} and count {self.count}: a run begins with count generators, so raise "
                "max_count to it, or leave it out"
            )
        return self
