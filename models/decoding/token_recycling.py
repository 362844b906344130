"""Token Recycling (arXiv 2408.08696), a baseline without training: propose what the target found likely before.

When the target has read a token, its most likely next token is kept as that token's successor. A chain goes from
successor to successor.

Differences from the paper: chains only, so one candidate of a token in place of several; a successor changes only for
tokens of the text, prompt included (the paper also keeps what followed rejected proposals); and every text starts
without successors (the paper carries them over). So proposals depend on the text alone, and the order of prompts cannot
change a figure.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from models.drafts.batched_proposer import Turn
from models.drafts.trees import Tree, certain


class TokenRecycling:
    """Proposes from the conversation's own text and the target's likely tokens along it."""

    def proposers(self, count: int) -> "TokenRecyclingProposer":
        return TokenRecyclingProposer(count)


class TokenRecyclingProposer:
    """Token Recycling for several texts; proposes with certainty, ignores features."""

    branches, candidates, confidences = False, 1, None

    def __init__(self, rows: int):
        self._successors: list[dict[int, int]] = [{} for _ in range(rows)]
        """Per text, by token read."""

    def observe(self, row: int, tokens: Tensor, likeliest: Tensor) -> None:
        """See `Proposer.observe`; the last occurrence of a token counts."""
        self._successors[row].update(zip(tokens.tolist(), likeliest[:, 0].tolist(), strict=True))

    def propose(self, turns: Mapping[int, Turn]) -> dict[int, Tree]:
        """See `Proposer.propose`; a chain ends before the first token that was never read."""
        trees = {}
        for row, turn in turns.items():
            token, proposed = turn.text[-1], list[int]()
            assert isinstance(turn.shape, int)
            while len(proposed) < turn.shape and token in self._successors[row]:
                token = self._successors[row][token]
                proposed.append(token)
            trees[row] = Tree.chain(certain(proposed, turn.aux.device))
        return trees

    def only(self, rows: Sequence[int]) -> None:
        """Drop all other rows."""
        self._successors = [self._successors[row] for row in rows]
