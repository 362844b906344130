"""Real decoding in the benchmark: reference acceptance, the lossless check, and speed of both ways in the same run."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from infra.records.acceptance import SpeedRecord
from models.benchmark.contestants import Contestants
from models.benchmark.speed import speed_record
from models.config.benchmark import BenchmarkConfig
from models.decoding.acceptance import acceptance_length
from models.decoding.lossless import Comparison, LosslessCheck, total
from models.decoding.plain import decode, prefill
from models.decoding.speculative import Decoded, decode_speculatively, speculate
from models.drafts.sampling import Sampling


@dataclass(frozen=True)
class ReferenceRun:
    """Conversations 0..n-1 decoded for real at one lookahead."""

    decoded: tuple[Decoded, ...]
    comparisons: tuple[Comparison, ...]
    speed: SpeedRecord

    @property
    def lossless(self) -> Comparison:
        return total(self.comparisons)


@dataclass(frozen=True)
class _Timing:
    tokens: int = 0
    plain_s: float = 0.0
    speculative_s: float = 0.0
    conversations: int = 0

    def add(self, tokens: int, plain_s: float, speculative_s: float) -> "_Timing":
        return replace(
            self,
            tokens=self.tokens + tokens,
            plain_s=self.plain_s + plain_s,
            speculative_s=self.speculative_s + speculative_s,
            conversations=self.conversations + 1,
        )


def decode_reference(
    contestants: Contestants,
    config: BenchmarkConfig,
    lookahead: int,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    advance: Callable[[int], None],
) -> ReferenceRun:
    """Decode conversations in order until `reference_tokens` tokens are there.

    The first ones, up to `timed_tokens`, are decoded by the target alone too, one after the other with the speculative
    decoding, both timed after the prefill. The others are compared with their batched plain continuations.

    Args:
        contestants: target and draft.
        config: how many tokens.
        lookahead: tokens proposed per step.
        prompts: token ids.
        texts: greedy continuation of each prompt by the target alone.
        advance: called with the number of tokens decoded.
    """
    check = LosslessCheck(contestants.target, contestants.exact, config.max_new_tokens, contestants.eos_ids)
    decoded: list[Decoded] = []
    comparisons: list[Comparison] = []
    timing, done = _Timing(), 0
    for prompt, text in zip(prompts, texts, strict=True):
        if done >= config.reference_tokens:
            break
        timed = timing.tokens < config.timed_tokens
        plain, plain_s = _plainly(contestants, config, prompt) if timed else (text, 0.0)
        result, speculative_s = _speculatively(contestants, config, lookahead, prompt)
        decoded.append(result)
        comparisons.append(check.compare(prompt, result.tokens, plain))
        if timed:
            timing = timing.add(len(result.tokens) - 1, plain_s, speculative_s)
        done += len(result.tokens)
        advance(len(result.tokens))
    length = acceptance_length([result.counts for result in decoded[: timing.conversations]])
    speed = speed_record(timing.tokens, timing.plain_s, timing.speculative_s, length)
    return ReferenceRun(tuple(decoded), tuple(comparisons), speed)


def decode_sampled(
    contestants: Contestants,
    config: BenchmarkConfig,
    prompts: Sequence[Sequence[int]],
    seed: int,
    advance: Callable[[int], None],
) -> tuple[Decoded, ...]:
    """Decode conversations in order, at the sampled temperature, until `sampled_reference_tokens` tokens are there."""
    generator = torch.Generator(contestants.target.device).manual_seed(seed)
    sampling = Sampling(config.sampled_temperature, config.sampled_top_p, generator)
    decoded: list[Decoded] = []
    done = 0
    for prompt in prompts:
        if done >= config.sampled_reference_tokens:
            break
        result = speculate(
            contestants.target,
            contestants.draft,
            prompt,
            config.lookahead,
            config.max_new_tokens,
            contestants.eos_ids,
            sampling=sampling,
        )
        decoded.append(result)
        done += len(result.tokens)
        advance(len(result.tokens))
    return tuple(decoded)


def _plainly(contestants: Contestants, config: BenchmarkConfig, prompt: Sequence[int]) -> tuple[list[int], float]:
    start = prefill(contestants.target, prompt)
    begun = time.perf_counter()
    text = decode(contestants.target, start, config.max_new_tokens, contestants.eos_ids)
    return text, time.perf_counter() - begun


def _speculatively(
    contestants: Contestants, config: BenchmarkConfig, lookahead: int, prompt: Sequence[int]
) -> tuple[Decoded, float]:
    start = prefill(contestants.target, prompt)
    begun = time.perf_counter()
    result = decode_speculatively(
        contestants.target, contestants.draft, start, lookahead, config.max_new_tokens, contestants.eos_ids
    )
    return result, time.perf_counter() - begun
