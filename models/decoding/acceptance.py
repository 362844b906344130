"""What happened in verification steps, and acceptance figures from it: ratios of sums over conversations."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from infra.records.acceptance import Acceptance
from infra.refusal import Refusal

WINDOW = 128
"""Tokens within which repetition is looked for."""


@dataclass(frozen=True)
class AcceptedCounts:
    """Accepted draft tokens of every complete verification step, in order.

    A step is complete with the token that closes it, the correction or bonus token, or with an accepted end of text:
    it emits nothing after that, and engines count what a step emits. A step that the maximum length *cuts* before
    either is left out of every figure.
    """

    lookahead: int
    accepted: tuple[int, ...]
    """Per closed step, 0..lookahead."""
    cut: int = 0
    """Steps left out: 0 or 1 per conversation."""
    ended: int = 0
    """Draft tokens of the step whose last accepted one is the end of the text, which is 1 at least; 0: no such step."""

    @property
    def steps(self) -> int:
        return len(self.accepted) + (self.ended > 0)

    @property
    def tokens(self) -> int:
        """Tokens emitted by the complete steps, correction and bonus tokens included."""
        return sum(self.accepted) + len(self.accepted) + self.ended

    def as_served(self, emitted: int) -> tuple[int, int]:
        """(tokens, steps) as an engine counts a request that emitted `emitted` tokens after the prefill token.

        An engine counts the cut step too.
        """
        return emitted, self.steps + self.cut

    def at_position(self, position: int) -> tuple[int, int]:
        """(steps in which draft token `position` (from 1) was accepted, steps in which all before it were).

        After the end of a text nothing is accepted or refused.
        """
        before = self.ended >= position
        accepted = sum(count >= position for count in self.accepted)
        offered = sum(count >= position - 1 for count in self.accepted)
        return accepted + before, offered + before


@dataclass(frozen=True)
class ExpectedCounts:
    """Expected numbers of a text's verification steps, where which proposals are accepted is a matter of chance."""

    lookahead: int
    by_accepted: tuple[float, ...]
    """Closed steps that accept 0..lookahead draft tokens."""
    cut: float = 0.0
    """Steps left out: the chance that the maximum length cuts one."""
    ended: tuple[float, ...] = ()
    """Steps that accept 0..lookahead draft tokens, the end of the text last; empty: it does not end."""

    @property
    def steps(self) -> float:
        return sum(self.by_accepted) + sum(self.ended)

    @property
    def tokens(self) -> float:
        """Tokens emitted by the complete steps, correction and bonus tokens included."""
        closed = sum((number + 1) * steps for number, steps in enumerate(self.by_accepted))
        return closed + sum(number * steps for number, steps in enumerate(self.ended))

    def as_served(self, emitted: int) -> tuple[float, float]:
        """See `AcceptedCounts.as_served`; the steps are expected."""
        return emitted, self.steps + self.cut

    def at_position(self, position: int) -> tuple[float, float]:
        """See `AcceptedCounts.at_position`."""
        before = sum(self.ended[position:])
        return sum(self.by_accepted[position:]) + before, sum(self.by_accepted[position - 1 :]) + before


Counts = AcceptedCounts | ExpectedCounts
AnyCounts = TypeVar("AnyCounts", bound=Counts)


def acceptance_length(counts: Sequence[Counts]) -> float:
    """Tokens emitted after the prefill token / verification steps, over complete steps.

    Raises Refusal where there is none.
    """
    steps = sum(count.steps for count in counts)
    if steps == 0:
        raise Refusal(
            "no verification step is complete: the target ends its text at once, or benchmark.max_new_tokens is too "
            "small for the lookahead"
        )
    return sum(count.tokens for count in counts) / steps


def by_position(counts: Sequence[Counts], lookahead: int) -> tuple[float | None, ...]:
    """Acceptance rate at positions 1..lookahead, given that all earlier ones were accepted; None if never proposed."""
    rates: list[float | None] = []
    for position in range(1, lookahead + 1):
        pairs = [count.at_position(position) for count in counts]
        offered = sum(pair[1] for pair in pairs)
        rates.append(sum(pair[0] for pair in pairs) / offered if offered else None)
    return tuple(rates)


def summarise(conversations: Sequence[Sequence[Counts]]) -> Acceptance:
    """Acceptance by lookahead.

    Args:
        conversations: per conversation its counts at the same lookaheads, ascending.
    """
    by_lookahead = list(zip(*conversations, strict=True))
    assert by_lookahead, "no conversation"
    lookaheads = [counts[0].lookahead for counts in by_lookahead]
    assert all(count.lookahead == counts[0].lookahead for counts in by_lookahead for count in counts)
    return Acceptance(
        conversations=len(conversations),
        length={at: acceptance_length(counts) for at, counts in zip(lookaheads, by_lookahead, strict=True)},
        steps={at: round(sum(c.steps for c in counts)) for at, counts in zip(lookaheads, by_lookahead, strict=True)},
        by_position=by_position(by_lookahead[-1], lookaheads[-1]),
    )


def distinct_token_share(texts: Sequence[Sequence[int]]) -> float:
    """Mean over texts of distinct tokens / tokens, distinct within each `WINDOW` tokens.

    Over a whole text the share would fall with its length: ordinary prose has 0.6 at 128 tokens and 0.2 at 4096. A text
    that repeats p tokens has p / `WINDOW`, or p / its length if it is shorter.
    """
    assert texts
    assert all(texts)
    return sum(_distinct_tokens(text) / len(text) for text in texts) / len(texts)


def _distinct_tokens(text: Sequence[int]) -> int:
    return sum(len(set(text[first : first + WINDOW])) for first in range(0, len(text), WINDOW))
