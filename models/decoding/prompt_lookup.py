"""Prompt lookup, a baseline without training: propose what followed the same tokens the last time.

After Saxena's prompt lookup decoding (2023), in its strongest form: a copy that reaches the end of the text continues
with its own proposals, so repetitive text is followed for the whole lookahead.
"""

from collections.abc import Iterable

from models.decoding.copying import CopyingSource
from models.drafts.trees import NO_PROPOSAL

LONGEST_NGRAM = 3


class _History:
    """A growing text that knows, for its last n-grams, where each stood most recently before."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._follows: list[dict[tuple[int, ...], int]] = [{} for _ in range(LONGEST_NGRAM)]
        self._source: int | None = None

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            self._source = None
            end = len(self.tokens)
            for length in range(1, min(LONGEST_NGRAM, end) + 1):  # the longest match is found last
                seen, ngram = self._follows[length - 1], tuple(self.tokens[end - length :])
                if ngram in seen:
                    self._source = seen[ngram]
                seen[ngram] = end

    def propose(self, lookahead: int) -> list[int]:
        """What followed the longest n-gram (3, 2, 1 tokens) at its most recent earlier place."""
        if self._source is None:
            return [NO_PROPOSAL] * lookahead
        end, proposed = len(self.tokens), []
        for position in range(self._source, self._source + lookahead):
            proposed.append(self.tokens[position] if position < end else proposed[position - end])
        return proposed


class PromptLookup(CopyingSource):
    """Proposes from the conversation's own text, `NO_PROPOSAL` where nothing repeats. Ignores features."""

    def __init__(self) -> None:
        super().__init__(_History)
