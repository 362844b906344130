"""Suffix decoding (arXiv 2411.04975), a baseline without training: propose what most often followed the same tokens.

The text's last p tokens are searched for in the text itself and in a log of earlier texts. For each p, a chain follows
the most frequent next token; it ends after p tokens (`FACTOR` per matched token), or where its share of the
continuations falls below `LEAST_SHARE`. The chain with the greatest expected acceptance, the sum of these shares, is
proposed.

The shares are those of a suffix tree of depth `DEPTH`. They are counted from the positions where the match stands, so
memory is linear in the text, and the log keeps its newest `LOG_TOKENS` tokens.

Differences from the paper: chains only, and the log does not grow while texts are decoded. So proposals depend on the
text and the log alone, and the order of prompts cannot change a figure.
"""

from collections.abc import Iterable, Sequence
from functools import partial

from models.decoding.copying import CopyingSource
from models.drafts.trees import NO_PROPOSAL

DEPTH = 24
"""Most tokens of a match and its chain together."""
FACTOR = 1.0
LEAST_SHARE = 0.1
LOG_TOKENS = 200_000
"""Also bounds the time of a step, which passes over all places of the last token."""


class _Positions:
    """A growing text that knows where each token stands."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._ends: dict[int, list[int]] = {}
        """By token, the positions after it, ascending."""

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            self._ends.setdefault(token, []).append(len(self.tokens))

    def matches(self, tail: Sequence[int]) -> list[list[int]]:
        """Where the last 1, 2, ... tokens of `tail` stand with a token after them: the positions of that token."""
        known, found = self.tokens, list[list[int]]()
        ends = [end for end in self._ends.get(tail[-1], []) if end < len(known) and known[end] != NO_PROPOSAL]
        while ends and len(found) < DEPTH - 1:
            found.append(ends)
            length = len(found) + 1
            if length > len(tail):
                break
            ends = [end for end in ends if end >= length and known[end - length] == tail[-length]]
        return found

    def chain(self, ends: list[int], longest: int) -> tuple[float, list[int]]:
        """The expected acceptance of the most frequent continuation from these positions, and its tokens.

        The most recent of equally frequent tokens is taken.
        """
        score, share, proposed = 0.0, 1.0, list[int]()
        while len(proposed) < longest:
            following: dict[int, list[int]] = {}
            for end in ends:
                if end < len(self.tokens) and self.tokens[end] != NO_PROPOSAL:
                    following.setdefault(self.tokens[end], []).append(end + 1)
            if not following:
                break
            token, after = max(following.items(), key=lambda each: (len(each[1]), each[1][-1]))
            share *= len(after) / sum(map(len, following.values()))
            if share < LEAST_SHARE:
                break
            proposed.append(token)
            score, ends = score + share, after
        return score, proposed


class _Text(_Positions):
    """A growing text that proposes from itself and from the log."""

    def __init__(self, log: _Positions) -> None:
        super().__init__()
        self._log = log

    def propose(self, lookahead: int) -> list[int]:
        """The first tokens of the best chain, padded with `NO_PROPOSAL`; its own and longer matches win ties."""
        tail, best = self.tokens[-DEPTH + 1 :], (0.0, list[int]())
        for place in (self, self._log):
            for length, ends in reversed(list(enumerate(place.matches(tail), start=1))):
                found = place.chain(ends, min(int(FACTOR * length), DEPTH - length))
                best = max(best, found, key=lambda each: each[0])
        # The choice does not depend on the lookahead, so that shorter chains begin longer ones.
        return (best[1] + [NO_PROPOSAL] * lookahead)[:lookahead]


class SuffixDecoding(CopyingSource):
    """Proposes from the conversation's own text and from a log of earlier texts. Ignores features.

    Args:
        log: token ids of earlier texts, oldest first; empty: the conversation's own text only.
    """

    def __init__(self, log: Iterable[Sequence[int]] = ()):
        joined = [token for text in log for token in (*text, NO_PROPOSAL)]
        self.log = _Positions()
        self.log.extend(joined[-LOG_TOKENS:])
        super().__init__(partial(_Text, self.log))
