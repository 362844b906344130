"""Whether speculative text is what the target writes alone: mismatches, and ties of the arithmetic.

Both texts are compared up to their first divergence; plain decoding then continues from the speculative prefix, and so
on to the end. A divergence is a tie only if its token is within delta of the largest logit in a full float32 forward on
the same prefix: 1e-3 for a float32 target, else twice the largest difference between the target's logits and the
float32 ones at that position.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from models.decoding.counts import ended
from models.decoding.plain import continue_greedily
from models.targets.model import TargetModel

FLOAT32_DELTA = 1e-3


@dataclass(frozen=True)
class Mismatch:
    """One place where the speculative text leaves the plain one."""

    position: int
    """Index into the continuation."""
    token: int | None
    """The speculative token; None if the speculative text ends and the plain one does not."""
    gap: float
    """Largest float32 logit minus the token's."""
    delta: float
    tie: bool


@dataclass(frozen=True)
class Comparison:
    """Verdict over one or more conversations."""

    tokens: int
    divergences: tuple[Mismatch, ...]

    @property
    def ties(self) -> int:
        return sum(divergence.tie for divergence in self.divergences)

    @property
    def mismatches(self) -> int:
        return len(self.divergences) - self.ties


@dataclass(frozen=True)
class LosslessCheck:
    """Compares speculative with plain text of one target.

    `exact` gives the same target in float32 (the target itself where it is float32); it is called at divergences only.
    """

    target: TargetModel
    exact: Callable[[], TargetModel]
    max_new_tokens: int
    eos_ids: frozenset[int]

    def compare(self, prompt: Sequence[int], speculative: Sequence[int], plain: Sequence[int]) -> Comparison:
        """Compare two continuations of one prompt; `plain` is the target's own, of at most `max_new_tokens`."""
        text, own = list(speculative), list(plain)
        divergences: list[Mismatch] = []
        start = 0
        while (agreeing := _common(text[start:], own)) < max(len(text) - start, len(own)):
            place = start + agreeing
            if agreeing == min(len(text) - start, len(own)):
                # One text stops where the other continues: never a matter of arithmetic.
                token = text[place] if place < len(text) else None
                divergences.append(Mismatch(place, token, float("inf"), 0.0, tie=False))
                break
            divergences.append(self._judge([*prompt, *text[:place]], place, text[place]))
            start = place + 1
            own = []
            if not ended(text[:start], self.max_new_tokens, self.eos_ids):
                left = self.max_new_tokens - start
                own = continue_greedily(self.target, [*prompt, *text[:start]], left, self.eos_ids)
        return Comparison(len(text), tuple(divergences))

    def _judge(self, prefix: list[int], position: int, token: int) -> Mismatch:
        exact = self.exact()
        logits = _last_logits(exact, prefix)
        delta = FLOAT32_DELTA
        if exact is not self.target:
            delta = 2 * float((_last_logits(self.target, prefix) - logits).abs().max())
        gap = float(logits.max() - logits[token])
        return Mismatch(position, token, gap, delta, tie=gap <= delta)


def _last_logits(target: TargetModel, prefix: list[int]) -> torch.Tensor:
    states = target.forward(torch.tensor([prefix], device=target.device))
    return target.logits(states.last[0, -1:])[0]


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return min(len(first), len(second))


def total(comparisons: Sequence[Comparison]) -> Comparison:
    """All conversations together."""
    return Comparison(
        sum(comparison.tokens for comparison in comparisons),
        tuple(divergence for comparison in comparisons for divergence in comparison.divergences),
    )
