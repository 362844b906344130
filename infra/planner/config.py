"""What the planner is told where it cannot know: part of the recipe. Reaches pydantic only."""

from typing import Literal

from pydantic import Field

from infra.config import StrictConfig
from infra.planner.shapes import TargetShape


class PlanConfig(StrictConfig):
    """Assumptions of `draftsmith retrain RECIPE --plan`; none of them changes a run."""

    device: Literal["A100", "H100", "H200", "B200", "cpu"] | None = Field(
        default=None,
        description="Whose figures of infra/planner/devices.py are used. Default: this machine's GPUs, else H100; cpu "
        "where the pools have no GPUs.",
    )
    memory_gb: float | None = Field(default=None, gt=0, le=100_000, description="Memory of one GPU in GB (10^9 bytes).")
    peak_tflops: float | None = Field(
        default=None,
        gt=0,
        le=1_000_000,
        description="Dense peak of one GPU (of a core: cpu) at the precision in use, in TFLOP/s.",
    )
    price_per_hour: float | None = Field(default=None, ge=0, le=1_000_000, description="Of one GPU, in US dollars.")
    inference_share: float = Field(
        default=0.43,
        gt=0,
        le=1,
        description="Share of the peak that prefill reaches. 0.43 is published for Qwen3-8B on H200 (SpecForge).",
    )
    training_share: float = Field(
        default=0.38,
        gt=0,
        le=1,
        description="Share of the peak that draft steps reach in a run. 0.38 is published for a draft with DFlash's "
        "layers on H200, 0.44 for its step alone (SpecForge).",
    )
    link_gbit: float = Field(
        default=400.0,
        gt=0,
        le=1_000_000,
        description="Network link of one machine in Gbit/s, where there are several machines.",
    )
    gpus_per_machine: int = Field(default=8, ge=1, le=4096)
    samples: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000_000_000,
        description="Training samples. Default: data.max_samples, or counted in a local .jsonl.",
    )
    mean_tokens: int | None = Field(
        default=None, ge=1, le=2**24, description="Mean length of a sample. Default: estimated, and said so."
    )
    supervised_share: float = Field(default=1.0, gt=0, le=1, description="Of the tokens of a sample.")
    target: TargetShape | None = Field(
        default=None, description="The target's shape, where no `config.json` of it is at hand."
    )
