"""What happened in the verification steps of one conversation. Counted by decoder and simulated walk in benchmarks."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AcceptedCounts:
    """Accepted draft tokens of every complete verification step, in order.

    A step is *cut* when the text (end of text or maximum length) ends before the token that would close the step,
    the correction or bonus token. Cut steps are left out of every figure.
    """

    lookahead: int
    accepted: tuple[int, ...]
    """Per complete step, 0..lookahead."""
    cut: int = 0
    """Steps left out: 0 or 1 per conversation."""

    @property
    def steps(self) -> int:
        return len(self.accepted)

    @property
    def tokens(self) -> int:
        """Tokens emitted by the complete steps, correction and bonus tokens included."""
        return sum(self.accepted) + len(self.accepted)

    def as_served(self, emitted: int) -> tuple[int, int]:
        """(tokens, steps) as an engine counts a request that emitted `tokens` tokens after the prefill token.

        An engine counts the cut step too.
        """
        return emitted, self.steps + self.cut

    def at_position(self, position: int) -> tuple[int, int]:
        """(steps in which draft token `position` (from 1) was accepted, steps in which all before it were)."""
        accepted = sum(count >= position for count in self.accepted)
        offered = sum(count >= position - 1 for count in self.accepted)
        return accepted, offered


def ended(tokens: list[int], max_new_tokens: int, eos_ids: frozenset[int]) -> bool:
    """Whether a continuation is over: at its maximum length, or at the end of the text."""
    return len(tokens) >= max_new_tokens or (bool(tokens) and tokens[-1] in eos_ids)


def end_of(tokens: list[int], eos_ids: frozenset[int]) -> list[int]:
    """`tokens` up to and including the first end-of-text token."""
    for index, token in enumerate(tokens):
        if token in eos_ids:
            return tokens[: index + 1]
    return tokens
