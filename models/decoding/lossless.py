"""Whether speculative text is what the target writes alone: mismatches, and ties of the arithmetic.

Both texts are compared up to their first divergence; plain decoding then continues from the speculative prefix, and so
on to the end. A divergence is a tie only if its token is within delta of the largest logit in a full float32 forward on
the same prefix: 1e-3 for a float32 target, else twice the largest difference between the target's logits and the
float32 ones at that position.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from infra.records.acceptance import DivergenceRecord, LosslessRecord
from models.decoding.plain import continue_greedily, ended
from models.targets.model import TargetModel

FLOAT32_DELTA = 1e-3


class OwnText(Protocol):
    """What the target alone writes, greedily."""

    @property
    def max_new_tokens(self) -> int: ...

    @property
    def eos_ids(self) -> frozenset[int]: ...

    def continued(self, prefix: list[int], tokens: int) -> list[int]:
        """The target's own continuation of `prefix`, of at most `tokens` tokens."""
        ...

    def judge(self, prefix: list[int], position: int, token: int) -> DivergenceRecord:
        """Whether `token`, which follows `prefix` at `position` of the text, ties with the target's own choice."""
        ...


def compare_texts(
    own_text: OwnText, prompt: Sequence[int], speculative: Sequence[int], plain: Sequence[int]
) -> LosslessRecord:
    """Compare two continuations of one prompt; `plain` is the target's own, of at most `max_new_tokens`."""
    text, own = list(speculative), list(plain)
    divergences: list[DivergenceRecord] = []
    start = 0
    while (agreeing := _common(text[start:], own)) < max(len(text) - start, len(own)):
        place = start + agreeing
        if agreeing == min(len(text) - start, len(own)):
            # One text stops where the other continues: never a matter of arithmetic.
            token = text[place] if place < len(text) else None
            divergences.append(DivergenceRecord(position=place, token=token, gap=None, delta=0.0, tie=False))
            break
        divergences.append(own_text.judge([*prompt, *text[:place]], place, text[place]))
        start = place + 1
        own = []
        if not ended(text[:start], own_text.max_new_tokens, own_text.eos_ids):
            own = own_text.continued([*prompt, *text[:start]], own_text.max_new_tokens - start)
    return _verdict(len(text), divergences)


@dataclass(frozen=True)
class LosslessCheck:
    """Compares speculative with plain text of one target.

    `exact` gives the same target in float32 (the target itself where it is float32); it is called at divergences only.
    """

    target: TargetModel
    exact: Callable[[], TargetModel]
    max_new_tokens: int
    eos_ids: frozenset[int]

    def compare(self, prompt: Sequence[int], speculative: Sequence[int], plain: Sequence[int]) -> LosslessRecord:
        """Compare two continuations of one prompt; `plain` is the target's own, of at most `max_new_tokens`."""
        return compare_texts(self, prompt, speculative, plain)

    def continued(self, prefix: list[int], tokens: int) -> list[int]:
        """See `OwnText`."""
        return continue_greedily(self.target, prefix, tokens, self.eos_ids)

    def judge(self, prefix: list[int], position: int, token: int) -> DivergenceRecord:
        """See `OwnText`."""
        exact = self.exact()
        logits = _last_logits(exact, prefix)
        delta = FLOAT32_DELTA
        if exact is not self.target:
            delta = 2 * float((_last_logits(self.target, prefix) - logits).abs().max())
        gap = float(logits.max() - logits[token])
        return DivergenceRecord(position=position, token=token, gap=gap, delta=delta, tie=gap <= delta)


def _last_logits(target: TargetModel, prefix: list[int]) -> torch.Tensor:
    """On the CPU: the exact target may be on another device than the target."""
    states = target.forward(torch.tensor([prefix], device=target.device))
    return target.logits(states.last[0, -1:])[0].cpu()


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    shorter = min(len(first), len(second))
    return next((index for index in range(shorter) if first[index] != second[index]), shorter)


def _verdict(tokens: int, divergences: Sequence[DivergenceRecord]) -> LosslessRecord:
    ties = sum(divergence.tie for divergence in divergences)
    return LosslessRecord(tokens=tokens, mismatches=len(divergences) - ties, ties=ties, divergences=tuple(divergences))


def total(records: Iterable[LosslessRecord]) -> LosslessRecord:
    """All conversations together."""
    compared = list(records)
    return _verdict(
        sum(record.tokens for record in compared),
        [divergence for record in compared for divergence in record.divergences],
    )
