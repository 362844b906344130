"""What is measured on the held-out prompts, and what a challenger must show."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from infra.config import Address, StrictConfig

Requests = Annotated[int, Field(ge=1, le=4096)]
SuiteName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100)]


class BenchmarkConfig(StrictConfig):
    """Acceptance benchmark."""

    prompts: int = Field(default=48, ge=2, le=1_000_000, description="Held-out prompts.")
    prompt_tokens: int = Field(default=64, ge=1, le=2**24, description="Longest prompt, in tokens.")
    max_new_tokens: int = Field(default=64, ge=4, le=2**20, description="Continuation length, in tokens.")
    max_lookahead: int = Field(default=7, ge=1, le=16, description="Simulated acceptance is shown for 1 up to this.")
    lookahead: int = Field(default=4, ge=1, le=16, description="Lookahead of the reference decoding and of the gate.")
    reference_tokens: int = Field(
        default=1000, ge=1, le=1_000_000_000, description="Tokens decoded for real, and compared with plain decoding."
    )
    timed_tokens: int = Field(
        default=256,
        ge=1,
        le=1_000_000_000,
        description="Of these, tokens decoded by the target alone as well, both timed.",
    )
    served_concurrency: tuple[Requests, ...] = Field(
        default=(1, 4),
        description="Requests at a time in the serving benchmark, which runs where SGLang is the engine; [] leaves it "
        "out.",
    )
    loads: tuple[Requests, ...] = Field(
        default=(1, 4, 16),
        description="Texts decoded at once for which goodput is predicted from step costs measured here, and serving "
        "settings are written; the first is the main one, which static settings are for. [] leaves it out.",
    )
    batch_size: int = Field(default=16, ge=1, le=4096, description="Continuations generated together.")
    compute_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Of target and draft; only float32 shows every figure without ties."
    )
    sampled_temperature: float = Field(
        default=1.0, gt=0, le=100, description="Temperature of the sampled figures shown beside greedy."
    )
    sampled_top_p: float = Field(
        default=1.0, gt=0, le=1, description="Top-p of the sampled figures, after the temperature; 1 keeps every token."
    )
    sampled_reference_tokens: int = Field(
        default=128,
        ge=0,
        le=1_000_000_000,
        description="Tokens decoded for real at that temperature; 0: that figure is left out.",
    )
    min_distinct_token_share: float = Field(
        default=0.05, ge=0, le=1, description="Below this the target is degenerate and its acceptance means nothing."
    )


class PromotionConfig(StrictConfig):
    """The gate between challenger and champion."""

    margin: float = Field(
        default=0.01, ge=0, le=10, description="Relative gain whose one-sided 97.5 % lower bound must be exceeded."
    )
    resamples: int = Field(default=10_000, ge=100, le=1_000_000)
    max_gap: float = Field(
        default=0.05, gt=0, le=100, description="Largest gap between simulated and reference acceptance length."
    )
    max_goodput_loss: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="A challenger is refused whose goodput at one of benchmark.loads is worse than the champion's by "
        "more than this, relatively. Step costs are timings, which differ by some per cent from run to run.",
    )
    suites: Mapping[SuiteName, Address] = Field(
        default={},
        description="Further prompts on which the gate must be passed as well, by name; they stay the same from run to "
        "run, where the held-out prompts change with the data. A source as in `data.source`, or one of `spec-bench`, "
        "`mt-bench`, `gsm8k`, `humaneval` and `math500`, which come from their public places (or from a source that is "
        "given under that name). Records of questions may name a `category`.",
    )
    suite_prompts: int = Field(
        default=160,
        ge=2,
        le=1_000_000,
        description="Most prompts of each suite of questions, spread evenly over its categories.",
    )
    suite_prompt_tokens: int = Field(
        default=1024, ge=2, le=2**24, description="Longer questions of a suite are left out and counted."
    )
    suite_margin: float = Field(
        default=0.01,
        gt=-1,
        le=10,
        description="Margin on each suite; below 0 a challenger may be worse there by so much, relatively.",
    )
    category_tolerance: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="A category blocks a challenger that is worse there than the champion by more than this, "
        "relatively, with Holm-adjusted p < 0.05; categories under 20 prompts are pooled.",
    )
    approval: bool = Field(
        default=False,
        description="A draft that passed the gate waits for a person: the deployment `promote` asks in Prefect's UI.",
    )
    smoke_prompts: int = Field(
        default=8,
        ge=2,
        le=10_000,
        description="Held-out prompts decoded with a promoted draft as it lies in the registry.",
    )
