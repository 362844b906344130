"""The conditions that every acceptance number carries."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infra.files.atomic import sha256_file
from infra.provenance import hardware, versions
from infra.records.acceptance import Conditions
from infra.records.data_path import TargetRecord
from infra.records.drafts import WEIGHTS
from infra.settings import leased_gpus
from infra.sglang.command import sglang_version
from models.config.benchmark import BenchmarkConfig
from models.data.thinking import OPENED, thinks
from models.data.tokenizer import read_tokenizer
from models.drafts.sampling import Sampling
from models.targets.model import TargetModel
from models.targets.recommended import recommended_sampling

OPENING = 16
"""Tokens at the end of a prompt that may open a block: `<think>`, perhaps in pieces, and a line break."""


@dataclass(frozen=True)
class Counter:
    """What decodes and counts."""

    engine: str
    dtype: str
    device: str
    concurrency: int = 1
    quantization: str | None = None

    @classmethod
    def reference(cls, model: TargetModel) -> "Counter":
        """The reference decoder."""
        device = torch.cuda.get_device_name() if model.device.type == "cuda" else "cpu"
        return cls("transformers", str(model.head_weight.dtype).removeprefix("torch."), device)

    @classmethod
    def sglang(cls, dtype: str, concurrency: int, quantization: str | None) -> "Counter":
        """SGLang, over all leased GPUs."""
        device = f"{len(leased_gpus())} GPUs" if leased_gpus() else "cpu"
        return cls(f"sglang {sglang_version()}", dtype, device, concurrency, quantization)


def sampled_law(config: BenchmarkConfig, recommended: Sampling) -> Sampling:
    """How the sampled figures are drawn: as the recipe says, otherwise as the target's makers recommend."""
    temperature, top_k, top_p = config.sampled_temperature, config.sampled_top_k, config.sampled_top_p
    return Sampling(
        recommended.temperature if temperature is None else temperature,
        recommended.top_p if top_p is None else top_p,
        top_k=recommended.top_k if top_k is None else top_k,
    )


def conditions(
    config: BenchmarkConfig,
    counter: Counter,
    *,
    target: TargetRecord,
    draft: Path | None,
    dataset_hash: str,
    template_hash: str,
    prompts: int,
    texts: Iterable[tuple[Sequence[int], Sequence[int]]] = (),
) -> Conditions:
    """Everything this process's numbers depend on; without a draft, only baselines were measured.

    `texts` are prompts with the target's continuations.
    """
    law = sampled_law(config, recommended_sampling(Path(target.path)))
    return Conditions(
        # Folder names, not paths: conditions are published, and revisions say what lies there.
        target=Path(target.name).name if Path(target.name).is_dir() else target.name,
        target_revision=target.revision,
        draft="/".join(draft.absolute().parts[-2:]) if draft else "none",
        draft_revision=sha256_file(draft / WEIGHTS) if draft else "none",
        dataset_hash=dataset_hash,
        template_hash=template_hash,
        thinking=_thinks(Path(target.path), texts),
        temperature=0.0,
        sampled_temperature=law.temperature,
        sampled_top_k=law.top_k,
        sampled_top_p=law.top_p,
        proposals=config.sampled_proposals,
        prompts=prompts,
        prompt_tokens=config.prompt_tokens,
        max_new_tokens=config.max_new_tokens,
        lookahead=config.lookahead,
        topk=1,
        concurrency=counter.concurrency,
        engine=counter.engine,
        quantization=counter.quantization,
        versions=versions(),
        dtype=counter.dtype,
        hardware=f"{hardware()}; ran on {counter.device}",
        threads=torch.get_num_threads(),
    )


def _thinks(target: Path, texts: Iterable[tuple[Sequence[int], Sequence[int]]]) -> bool:
    """Whether the target reasons: some templates open the block at the end of the prompt."""
    tokenizer: Any = read_tokenizer(target)

    def opened(prompt: Sequence[int]) -> str:
        return OPENED if tokenizer.decode(prompt[-OPENING:]).rstrip().endswith(OPENED) else ""

    return any(thinks(opened(prompt) + tokenizer.decode(text)) for prompt, text in texts)
