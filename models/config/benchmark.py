"""Settings of the benchmark and of the gate between challenger and champion."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from infra.config import Address, AtLeastOne, Count, Share, StrictConfig, Tokens, left_out

MOST_PROPOSALS = 16
"""Longest lookahead that is measured."""
Lookahead = Annotated[int, Field(ge=1, le=MOST_PROPOSALS)]
RelativeLoss = Annotated[float, Field(ge=0, lt=1)]
Prompts = Annotated[int, Field(ge=2, le=1_000_000)]
Proposals = Literal["greedy", "drawn"]
SuiteName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100)]


class BenchmarkConfig(StrictConfig):
    """Acceptance benchmark."""

    _gone = left_out("sampled_reference_tokens")  # runs, versions and deployments keep whole recipes
    prompts: Prompts = Field(default=48, description="Number of held-out prompts.")
    prompt_tokens: Tokens = Field(
        default=64,
        description="Longest prompt, in tokens. Default in a recipe file, unless data.chat_template=none: 512, or "
        "data.max_tokens if that is less.",
    )
    max_new_tokens: int = Field(default=64, ge=4, le=2**20, description="Longest continuation, in tokens.")
    max_lookahead: Lookahead = Field(
        default=7,
        description="Acceptance is simulated for lookaheads 1 to this one. Default in a recipe file: 7, or a whole "
        "block where that is longer.",
    )
    lookahead: Lookahead = Field(
        default=4,
        description="Lookahead of the reference decoding and of the gate. A recipe's default is a whole block for "
        "drafts of blocks, and at most the number of heads for Medusa.",
    )
    reference_tokens: AtLeastOne = Field(
        default=1000, description="Tokens that are really decoded with the draft and compared with plain decoding."
    )
    timed_tokens: AtLeastOne = Field(
        default=256, description="Of the reference tokens, those also decoded by the target alone to time both."
    )
    counted_by: Literal["auto", "reference", "engine"] = Field(
        default="auto",
        description="Who counts acceptance. `reference`: the reference decoder, which holds the whole target on one "
        "device. `engine`: SGLang, on all inference GPUs. `auto`: the engine where the target is quantized or exceeds "
        "one GPU.",
    )
    served_concurrency: tuple[Count, ...] = Field(
        default=(1, 4),
        description="Concurrent requests of the serving benchmark, which needs generator.engine=sglang; [] skips it.",
    )
    loads: tuple[Count, ...] = Field(
        default=(1, 4, 16),
        description="Batch sizes for which goodput is predicted from measured step costs, and serving settings are "
        "written; static settings are for the first one. [] skips both.",
    )
    tree_topk: tuple[Annotated[int, Field(ge=2, le=16)], ...] = Field(
        default=(2, 4),
        description="Top-k of the dynamic trees that are compared with chains at all of `loads`, for drafts whose "
        "trees SGLang serves (EAGLE-3); depths go up to `max_lookahead`. [] compares none.",
    )
    batch_size: Count = Field(default=16, description="Continuations that are generated together.")
    compute_dtype: Literal["float32", "bfloat16"] | None = Field(
        default=None,
        description="Data type of target and draft; bfloat16 can change a token where logits tie. Default: "
        "the target's with `pools.inference_gpus`, otherwise by the processor, as for the generator.",
    )
    sampled_temperature: float | None = Field(
        default=None,
        gt=0,
        le=100,
        description="Temperature of the sampled figures, which are reported next to the greedy ones. Default, as of "
        "the next two: the target's `generation_config.json`, by which engines sample where a request says nothing, "
        "or else 1.",
    )
    sampled_top_k: int | None = Field(
        default=None, ge=0, le=10_000_000, description="Top-k of the sampled figures, after temperature; 0 is off."
    )
    sampled_top_p: float | None = Field(
        default=None, gt=0, le=1, description="Top-p of the sampled figures, after top-k; 1 is off."
    )
    sampled_proposals: Proposals = Field(
        default="greedy",
        description="How the serving engine proposes for sampled text. `greedy`: the likeliest tokens, SGLang's "
        "default, but for DSpark and DFlash 2. `drawn`: drawn from the draft's distribution after temperature alone, "
        "its default for these two, and as with rejection sampling in vLLM (`draft_sample_method=probabilistic`). Both "
        "are measured; on sampled text the gate decides by this one. A recipe's default is that of its method.",
    )
    suffix_log: Address | None = Field(
        default=None,
        description="A log of requests (`.jsonl`, `.jsonl.gz`) as your servers write it. Suffix decoding, a baseline, "
        "is then also measured with these texts in its tree, unless SGLang counts acceptance.",
    )
    min_distinct_token_share: Share = Field(
        default=0.1,
        description="The target counts as degenerate when a smaller share of its tokens is distinct, within windows of "
        "128 tokens: its acceptance would mean nothing.",
    )


class TrafficConfig(StrictConfig):
    """What the draft is to serve."""

    sampling: Literal["sampled", "greedy"] = Field(
        default="sampled",
        description="`sampled`: text that the target samples as `benchmark.sampled_temperature`, `sampled_top_k` and "
        "`sampled_top_p` say, with proposals as `sampled_proposals` says. `greedy`: its greedy text.",
    )
    loads: tuple[Count, ...] | None = Field(
        default=None,
        description="Texts at once, of `benchmark.loads`, at which the draft must give more tokens per second than "
        "every rival, by measured step costs. Default: the first of `benchmark.loads`. []: tokens per step are "
        "compared, whatever they cost.",
    )

    def loads_of(self, benchmark: BenchmarkConfig) -> tuple[int, ...]:
        """The loads to compare at; empty: by tokens per step."""
        return benchmark.loads[:1] if self.loads is None else self.loads


class PromotionConfig(StrictConfig):
    """The gate between challenger and champion."""

    margin: float = Field(
        default=0.01, ge=0, le=10, description="Relative gain that the 97.5 % lower bound must exceed."
    )
    traffic: TrafficConfig = Field(
        default=TrafficConfig(),
        description="The traffic that the gate decides for. Where SGLang counts acceptance (benchmark.counted_by), the "
        "gate compares tokens per step of greedy text instead.",
    )
    max_gap: float = Field(default=0.05, gt=0, le=100, description="Largest gap of simulated to reference acceptance.")
    max_goodput_loss: RelativeLoss = Field(
        default=0.05,
        description="Largest relative loss of goodput against the champion at any of benchmark.loads. Step costs are "
        "timings, which vary by a few per cent from run to run.",
    )
    suites: Mapping[SuiteName, Address] = Field(
        default={},
        description="More prompts on which the gate must be passed, by name; unlike held-out prompts they stay the "
        "same when the data changes. Each is a source as in `data.source`, or one of `spec-bench`, `mt-bench`, "
        "`gsm8k`, `humaneval` and `math500`, which are fetched from where they are published (or from the source "
        "given under that name). Questions may have a `category`.",
    )
    suite_prompts: Prompts = Field(
        default=160, description="Most prompts per suite, spread evenly over its categories."
    )
    suite_prompt_tokens: int = Field(
        default=1024, ge=2, le=2**24, description="Longest question, in tokens; longer ones are skipped and counted."
    )
    suite_margin: float = Field(
        default=0.01, gt=-1, le=10, description="Relative gain required on each suite; a negative one allows a loss."
    )
    category_tolerance: RelativeLoss = Field(
        default=0.05,
        description="A category blocks a challenger whose relative loss there exceeds this with Holm-adjusted "
        "p < 0.05; categories with fewer than 20 prompts are pooled.",
    )
    approval: bool = Field(
        default=False,
        description="A draft that passed the gate waits for a person, whom the deployment `promote` asks in Prefect.",
    )
    smoke_prompts: int = Field(
        default=8, ge=2, le=10_000, description="Held-out prompts decoded with the registered draft after promotion."
    )
