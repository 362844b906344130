"""Acceptance figures from counts: ratios of sums over conversations."""

from collections.abc import Sequence

from infra.records.acceptance import Acceptance
from infra.refusal import Refusal
from models.decoding.counts import AcceptedCounts


def acceptance_length(counts: Sequence[AcceptedCounts]) -> float:
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


def by_position(counts: Sequence[AcceptedCounts], lookahead: int) -> tuple[float | None, ...]:
    """Acceptance rate at positions 1..lookahead, given that all earlier ones were accepted; None if never proposed."""
    rates: list[float | None] = []
    for position in range(1, lookahead + 1):
        pairs = [count.at_position(position) for count in counts]
        offered = sum(pair[1] for pair in pairs)
        rates.append(sum(pair[0] for pair in pairs) / offered if offered else None)
    return tuple(rates)


def summarise(conversations: Sequence[Sequence[AcceptedCounts]]) -> Acceptance:
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
        steps={at: sum(c.steps for c in counts) for at, counts in zip(lookaheads, by_lookahead, strict=True)},
        by_position=by_position(by_lookahead[-1], lookaheads[-1]),
    )


def distinct_token_share(texts: Sequence[Sequence[int]]) -> float:
    """Mean over texts of distinct tokens / tokens; a text that repeats one token n times has 1/n."""
    assert texts
    assert all(texts)
    return sum(len(set(text)) / len(text) for text in texts) / len(texts)
