"""Assumptions of the planner: a section of the recipe."""

from typing import Literal

from pydantic import Field

from infra.config import Count, StrictConfig, Tokens
from infra.planner.shapes import TargetShape


class PlanConfig(StrictConfig):
    """Assumptions of `draftsmith retrain RECIPE --plan`. They do not change a run."""

    device: Literal["A100", "H100", "H200", "B200", "RTX 4090", "cpu"] | None = Field(
        default=None,
        description="Device whose figures are used. Default: this machine's GPUs, else H100; cpu if the pools have no "
        "GPUs.",
    )
    gpus: Count | None = Field(default=None, description="GPUs of the machine; default: this machine's.")
    memory_gb: float | None = Field(default=None, gt=0, le=100_000, description="Memory of one GPU, in 10^9 bytes.")
    peak_tflops: float | None = Field(
        default=None,
        gt=0,
        le=1_000_000,
        description="Dense peak of one GPU (or CPU core) at the precision in use, in TFLOP/s. Default: of a GPU the "
        "data sheet's; of a CPU core measured on this machine, all its cores at once.",
    )
    price_per_hour: float | None = Field(
        default=None,
        ge=0,
        le=1_000_000,
        description="Price of a GPU hour, in dollars; with it runs tell what they cost.",
    )
    inference_share: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of the peak that prefill reaches. Default: 0.43 on GPUs, published for Qwen3-8B on H200 "
        "(SpecForge); 0.55 on CPUs, between an Intel's 0.47 and an AMD's 0.65, both with Gemma 3 270M.",
    )
    training_share: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of the peak that draft steps reach in a run. Default: 0.38 on GPUs, published for a draft "
        "with DFlash's layers on H200 (0.44 for its step alone, SpecForge); 0.6 on CPUs, "
        "between an Intel's 0.53 and an AMD's 0.7, both with the quickstart's EAGLE-3.",
    )
    decode_share: float = Field(
        default=0.6,
        gt=0,
        le=1,
        description="Share of the memory bandwidth that decoding reaches while answers are regenerated. Assumed.",
    )
    answer_tokens: Tokens | None = Field(
        default=None,
        description="Mean length of a regenerated answer. Default: the mean sample, at most "
        "data.regeneration.max_new_tokens.",
    )
    link_gbit: float = Field(
        default=400.0,
        gt=0,
        le=1_000_000,
        description="Network bandwidth of one machine, in Gbit/s; used if there are several machines.",
    )
    gpus_per_machine: Count = Field(default=8, description="GPUs per machine; more GPUs mean several machines.")
    samples: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000_000_000,
        description="Training samples. Default: data.max_samples, or counted in a local .jsonl.",
    )
    mean_tokens: Tokens | None = Field(default=None, description="Mean length of a sample; default: an estimate.")
    supervised_share: float = Field(default=1.0, gt=0, le=1, description="Share of supervised tokens in a sample.")
    target: TargetShape | None = Field(default=None, description="The target's shape; default: from its `config.json`.")
