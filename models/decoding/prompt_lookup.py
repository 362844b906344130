"""Prompt lookup, a baseline without training: propose what followed the same tokens the last time.

After Saxena's prompt lookup decoding (2023), in its strongest form: a copy that reaches the end of the text continues
with its own proposals, so repetitive text is followed for the whole lookahead.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from models.drafts.batched_proposer import Turn
from models.drafts.trees import NO_PROPOSAL, Likeliest, Tree, certain

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


class PromptLookup:
    """Proposes from the conversation's own text, `NO_PROPOSAL` where nothing repeats. Ignores features."""

    def proposers(self, count: int) -> "PromptLookupProposer":
        return PromptLookupProposer(count)

    def rollout(self, tokens: Tensor, aux: Tensor, lookahead: int) -> Tensor:
        """`[T, lookahead]` int64; see `RolloutSource.rollout`."""
        history, text = _History(), tokens.tolist()
        history.extend(text[:1])
        rows = []
        for token in text[1:]:
            history.extend([token])
            rows.append(history.propose(lookahead))
        return torch.tensor(rows, dtype=torch.long, device=tokens.device).view(-1, lookahead)


class PromptLookupProposer:
    """Prompt lookup for several texts: chains, proposed with certainty."""

    branches, candidates = False, 0

    def __init__(self, rows: int):
        self._histories = [_History() for _ in range(rows)]

    def propose(self, turns: Mapping[int, Turn]) -> dict[int, Tree]:
        """See `Proposer.propose`."""
        trees = {}
        for row, turn in turns.items():
            history = self._histories[row]
            history.extend(turn.text[len(history.tokens) :])
            assert isinstance(turn.shape, int)
            trees[row] = Tree.chain(certain(history.propose(turn.shape), turn.aux.device))
        return trees

    def observe(self, row: int, tokens: Tensor, likeliest: Likeliest) -> None:
        """Nothing is observed."""
        raise AssertionError

    def only(self, rows: Sequence[int]) -> None:
        """Drop all other rows."""
        self._histories = [self._histories[row] for row in rows]
