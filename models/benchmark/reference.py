"""Real decoding in the benchmark: reference acceptance, the lossless check, and speed of both ways in the same run."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from infra.records.acceptance import LosslessRecord, SpeedRecord
from models.benchmark.contestants import Contestants
from models.config.benchmark import BenchmarkConfig
from models.decoding.acceptance import acceptance_length
from models.decoding.lossless import LosslessCheck, total
from models.decoding.plain import decode, prefill
from models.decoding.speculative import Conversation, Decoded, decode_together
from models.drafts.sampling import GREEDY

TOLERANCE = 1.03
"""A speed-up can exceed the acceptance length by measurement noise only, this much at most."""


WARM_TOKENS = 8
"""Decoded before anything is timed."""


@dataclass(frozen=True)
class ReferenceRun:
    """Conversations 0..n-1 decoded for real at `config.lookahead`."""

    decoded: tuple[Decoded, ...]
    comparisons: tuple[LosslessRecord, ...]
    speed: SpeedRecord

    @property
    def lossless(self) -> LosslessRecord:
        return total(self.comparisons)


def decode_reference(
    contestants: Contestants,
    config: BenchmarkConfig,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    advance: Callable[[int], None],
) -> ReferenceRun:
    """Decode conversations in order until `reference_tokens` tokens are there.

    The first ones, up to `timed_tokens`, are decoded by the target alone too, one after the other with the speculative
    decoding, both timed after the prefill. The others are compared with their batched plain continuations.

    Args:
        contestants: target and draft.
        config: how many tokens, and the lookahead.
        prompts: token ids.
        texts: greedy continuation of each prompt by the target alone.
        advance: called with the number of tokens decoded.
    """
    target, most, eos_ids = contestants.target, config.max_new_tokens, contestants.eos_ids
    check = LosslessCheck(target, contestants.exact, most, eos_ids)
    decoded: list[Decoded] = []
    comparisons: list[LosslessRecord] = []
    timed, tokens, plain_s, speculative_s = 0, 0, 0.0, 0.0
    for prompt in prompts[:1]:  # what is compiled at the first steps is no part of the speed
        decode(target, prefill(target, prompt), min(most, WARM_TOKENS), eos_ids)
        start, few = prefill(target, prompt), min(most, WARM_TOKENS)
        warm = Conversation(target, contestants.draft, start, config.lookahead, few, eos_ids, sampling=GREEDY)
        decode_together([warm])
    for prompt, text in zip(prompts, texts, strict=True):
        if sum(len(each.tokens) for each in decoded) >= config.reference_tokens:
            break
        is_timed, plain = tokens < config.timed_tokens, text
        if is_timed:
            start, begun = prefill(target, prompt), time.perf_counter()
            plain = decode(target, start, most, eos_ids)
            plain_s += time.perf_counter() - begun
        start, begun = prefill(target, prompt), time.perf_counter()
        conversation = Conversation(target, contestants.draft, start, config.lookahead, most, eos_ids, sampling=GREEDY)
        decode_together([conversation])
        if is_timed:
            speculative_s += time.perf_counter() - begun
            timed, tokens = timed + 1, tokens + len(conversation.tokens) - 1
        decoded.append(conversation.decoded())
        comparisons.append(check.compare(prompt, conversation.tokens, plain))
        advance(len(conversation.tokens))
    length = acceptance_length([each.counts for each in decoded[:timed]])
    speed = speed_record(tokens, plain_s, speculative_s, length)
    return ReferenceRun(tuple(decoded), tuple(comparisons), speed)


def speed_record(tokens: int, plain_s: float, speculative_s: float, acceptance_length: float) -> SpeedRecord:
    """Judge one measurement.

    Args:
        tokens: emitted after the prefill tokens, the same text both ways.
        plain_s: seconds of the target alone for them.
        speculative_s: seconds of speculative decoding for them.
        acceptance_length: of the same conversations.
    """
    assert plain_s > 0
    assert speculative_s > 0
    speedup = plain_s / speculative_s
    possible = speedup <= TOLERANCE * acceptance_length
    note = f"{tokens} tokens after the prefill, batch 1, after warm-up"
    if not possible:
        note = (
            f"not published: a measured speed-up of {speedup:.2f} cannot come from an acceptance length of "
            f"{acceptance_length:.2f}; measure again on an idle machine, with more benchmark.timed_tokens"
        )
    return SpeedRecord(
        tokens=tokens,
        acceptance_length=acceptance_length,
        plain_tokens_per_s=tokens / plain_s,
        speculative_tokens_per_s=tokens / speculative_s if possible else None,
        speedup=speedup if possible else None,
        flagged=not possible,
        note=note,
    )
