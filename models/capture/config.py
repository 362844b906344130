"""How generators capture hidden states."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from infra.sglang.config import SGLangConfig


class GeneratorConfig(BaseModel):
    """Target prefill and capture."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: Literal["transformers", "sglang"] = Field(
        default="transformers", description="sglang: a server per generator, in an environment of its own."
    )
    count: int = Field(default=1, ge=1, description="Generator processes per run.")
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    stored_dtype: Literal["float32", "bfloat16"] = Field(
        default="bfloat16", description="Data type of captured hidden states."
    )
    lease_samples: int = Field(default=8, ge=1, description="Samples leased per ledger transaction.")
    threads: int | None = Field(default=None, ge=1, description="CPU threads of one generator; default: all cores.")
    sglang: SGLangConfig = SGLangConfig()

    @property
    def in_flight(self) -> int:
        """Samples that one generator captures at the same time."""
        return self.sglang.requests_in_flight if self.engine == "sglang" else 1

    @property
    def slots(self) -> int:
        """Samples that all generators together hold: leased, and in the engine."""
        return self.count * (self.lease_samples + self.in_flight)
