"""Prompt lookup, the baseline that needs no training: propose what followed the same words last time.

Runs in benchmarks. After Saxena's prompt lookup decoding (2023); a copy that reaches the end of the text goes on over
what it has just proposed, so a text that repeats itself is followed for the whole lookahead: the strongest form.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from models.drafts.batched_proposer import OneByOne
from models.drafts.proposals import NO_PROPOSAL, Proposals
from models.drafts.sampling import Sampling

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


class PromptLookup(OneByOne):
    """A `ProposalSource` over the conversation's own text; `NO_PROPOSAL` where nothing repeats. Ignores features."""

    def proposer(self) -> "PromptLookupProposer":
        return PromptLookupProposer()

    def rollout(self, tokens: Tensor, aux: Tensor, lookahead: int) -> Tensor:
        """`[T, lookahead]` int64; see `models.drafts.base.ProposalSource.rollout`."""
        history, text = _History(), tokens.tolist()
        history.extend(text[:1])
        rows = []
        for token in text[1:]:
            history.extend([token])
            rows.append(history.propose(lookahead))
        return torch.tensor(rows, dtype=torch.long, device=tokens.device).view(-1, lookahead)


class PromptLookupProposer:
    """Prompt lookup for one sequence."""

    def __init__(self) -> None:
        self._history = _History()

    def propose(self, sequence: Tensor, aux: Tensor, lookahead: int) -> Tensor:
        """`[lookahead]` int64; see `models.drafts.base.Proposer.propose`."""
        self._history.extend(sequence[len(self._history.tokens) :].tolist())
        return torch.tensor(self._history.propose(lookahead), dtype=torch.long, device=sequence.device)

    def sample(self, sequence: Tensor, aux: Tensor, lookahead: int, sampling: Sampling) -> Proposals:
        """The same proposals, with certainty; see `models.drafts.base.Proposer.sample`."""
        return Proposals(self.propose(sequence, aux, lookahead), None)
