"""Scaling of the rotary position embedding, with the names of Hugging Face's `rope_parameters`."""

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from infra.config import StrictConfig
from infra.refusal import Refusal

RopeType = Literal["linear", "llama3", "yarn"]
OF_TYPE: dict[RopeType, tuple[str, ...]] = {
    "linear": (),
    "llama3": ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate", "original_max_position_embeddings",
    ),
}  # fmt: skip
"""Settings that each type has besides `factor`."""


class RopeScaling(StrictConfig):
    """How a rotary embedding is stretched beyond the context that it was trained for; the target's is usually right."""

    rope_type: RopeType = Field(
        description="`linear`: every frequency is divided by `factor`. `llama3`: only low frequencies are (Llama 3.1). "
        "`yarn`: low frequencies are, and all rotated values are scaled (arXiv 2309.00071)."
    )
    factor: float = Field(ge=1, le=1e6, description="New context length / original one.")
    original_max_position_embeddings: int | None = Field(
        default=None, ge=2, le=2**30, description="`llama3`, `yarn`: context length before the scaling."
    )
    low_freq_factor: float = Field(
        default=1.0, gt=0, le=1e6, description="`llama3`: wavelengths over original length / this are divided."
    )
    high_freq_factor: float = Field(
        default=4.0, gt=0, le=1e6, description="`llama3`: wavelengths under original length / this stay."
    )
    beta_fast: float = Field(
        default=32.0, gt=0, le=1e6, description="`yarn`: frequencies of more turns in the original length stay."
    )
    beta_slow: float = Field(
        default=1.0, gt=0, le=1e6, description="`yarn`: frequencies of fewer turns in the original length are divided."
    )
    mscale: float | None = Field(
        default=None, gt=0, le=1e6, description="`yarn`: strength of the values' scale, with `mscale_all_dim`."
    )
    mscale_all_dim: float | None = Field(
        default=None, gt=0, le=1e6, description="`yarn`: the values' scale is divided by that of this strength."
    )
    truncate: bool = Field(default=True, description="`yarn`: round the bounds of the stretched dimensions outwards.")

    @model_validator(mode="after")
    def _belongs_to_the_type(self) -> Self:
        settings = OF_TYPE[self.rope_type]
        foreign = sorted(self.model_fields_set - {"rope_type", "factor", *settings})
        # What was read back from a run's file names every field.
        foreign = [name for name in foreign if getattr(self, name) != type(self).model_fields[name].default]
        if foreign:
            raise Refusal(f"rope_scaling.{foreign[0]}: rope_type {self.rope_type} has no such setting, leave it out")
        if "original_max_position_embeddings" in settings and self.original_max_position_embeddings is None:
            raise Refusal(
                f"rope_scaling.original_max_position_embeddings: rope_type {self.rope_type} needs it; it is in the "
                "target's config.json"
            )
        if self.rope_type == "llama3" and self.high_freq_factor < self.low_freq_factor:
            raise Refusal("rope_scaling.high_freq_factor must not be below low_freq_factor")
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise Refusal("rope_scaling.mscale and mscale_all_dim go together: set both, or neither")
        return self

    def parameters(self) -> dict[str, Any]:
        """As Hugging Face, SGLang and vLLM read them, without the base."""
        names = ("rope_type", "factor", *OF_TYPE[self.rope_type])
        return {name: value for name in names if (value := getattr(self, name)) is not None}
