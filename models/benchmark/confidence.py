"""How a draft's confidences have to be read, from real decoding of the benchmark's prompts."""

from collections.abc import Sequence

import torch

from infra.records.goodput import ConfidenceFit
from models.benchmark.conditions import sampled_law
from models.benchmark.contestants import Contestants, draft_of
from models.config.benchmark import BenchmarkConfig
from models.decoding.calibration import calibrate, decoded_confidences
from models.decoding.plain import prefill
from models.drafts.certain import ProposesCertainly
from models.drafts.sampling import GREEDY
from models.progress_bars import bars

LEAST_STEPS = 200
"""Fewer say too little about how often positions are reached."""


def confidence_fit(
    contestants: Contestants, config: BenchmarkConfig, prompts: Sequence[Sequence[int]], seed: int, *, sampled: bool
) -> ConfidenceFit | None:
    """Temperatures of the draft's confidences; None for a draft without any, and for too few steps.

    `sampled`: texts are drawn, and proposals too where `config.sampled_proposals` says so.
    """
    settings = draft_of(contestants.draft).config
    if not settings.confident:
        return None
    law = sampled_law(config, contestants.recommended) if sampled else GREEDY
    drawn = not sampled or config.sampled_proposals == "drawn"
    source = contestants.draft if drawn else ProposesCertainly(contestants.draft)
    parts, lookahead = [], settings.lookaheads(config.max_lookahead)[-1]
    with bars() as bar:
        advance = bar("confidences", len(prompts))
        for first in range(0, len(prompts), config.batch_size):
            group = prompts[first : first + config.batch_size]
            laws = [law.seeded(seed + first + row, contestants.target.device) for row in range(len(group))]
            read = [(prefill(contestants.target, prompt, own), own) for prompt, own in zip(group, laws, strict=True)]
            told = (config.max_new_tokens, contestants.target, contestants.eos_ids)
            parts.append(decoded_confidences(source, read, lookahead, *told))
            advance(len(group))
    logits, accepted = (torch.cat(of) for of in zip(*parts, strict=True))
    return calibrate(logits, accepted) if len(accepted) >= LEAST_STEPS else None
