"""How generators capture hidden states."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class CaptureConfig(BaseModel):
    """Target prefill and capture."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    engine: Literal["transformers"] = "transformers"
    generators: int = Field(default=1, ge=1, description="Generator processes per run.")
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    stored_dtype: Literal["float32", "bfloat16"] = Field(
        default="bfloat16", description="Data type of captured hidden states."
    )
    lease_samples: int = Field(default=8, ge=1, description="Samples leased per ledger transaction.")
    threads: int | None = Field(default=None, ge=1, description="CPU threads of one generator; default: all cores.")
