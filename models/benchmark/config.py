"""What is measured on the held-out prompts, and what a challenger must show."""

from pydantic import BaseModel, ConfigDict, Field


class BenchmarkConfig(BaseModel):
    """Acceptance benchmark."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    prompts: int = Field(48, ge=2, description="Held-out prompts.")
    prompt_tokens: int = Field(64, ge=1, description="Longest prompt, in tokens.")
    max_new_tokens: int = Field(64, ge=4, description="Continuation length, in tokens.")
    max_lookahead: int = Field(7, ge=1, le=16, description="Simulated acceptance is shown for 1 up to this.")
    lookahead: int = Field(4, ge=1, le=16, description="Lookahead of the reference decoding and of the gate.")
    reference_tokens: int = Field(1000, ge=1, description="Tokens decoded for real, and compared with plain decoding.")
    sampled_temperature: float = Field(1.0, gt=0, description="Temperature of the sampled figures shown beside greedy.")
    min_distinct_token_share: float = Field(
        0.05, ge=0, le=1, description="Below this the target is degenerate and its acceptance means nothing."
    )


class PromotionConfig(BaseModel):
    """The gate between challenger and champion."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    margin: float = Field(0.01, ge=0, description="Relative gain whose one-sided 97.5 % lower bound must be exceeded.")
    resamples: int = Field(10_000, ge=100)
    max_gap: float = Field(0.05, gt=0, description="Largest gap between simulated and reference acceptance length.")
