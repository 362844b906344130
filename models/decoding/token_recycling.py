"""Token Recycling (arXiv 2408.08696), a baseline without training: propose what the target found likely before.

When the target has read a token, its most likely next tokens replace that token's row of an adjacency matrix. A chain
follows the best candidate from row to row; a tree takes the first ones, breadth first.

Differences from the paper: a row changes only for tokens of the text, prompt included (the paper also keeps what
followed rejected proposals), and every text starts with an empty matrix (the paper carries it over). So proposals
depend on the text alone, and the order of prompts cannot change a figure.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from models.drafts.batched_proposer import Turn
from models.drafts.trees import NO_PROPOSAL, ROOT, Candidates, Growing, Likeliest, Tree, TreeShape, certain, grow


class TokenRecycling:
    """Proposes from the conversation's own text and the target's likely tokens along it."""

    def proposers(self, count: int) -> "TokenRecyclingProposer":
        return TokenRecyclingProposer(count)


class TokenRecyclingProposer:
    """Token Recycling for several texts; proposes with certainty, ignores features."""

    branches, candidates = True, 8

    def __init__(self, rows: int):
        self._matrices: list[dict[int, tuple[list[int], list[float]]]] = [{} for _ in range(rows)]
        """Per text, the adjacency matrix: candidates and their log-probabilities by token read."""

    def observe(self, row: int, tokens: Tensor, likeliest: Likeliest) -> None:
        """See `Proposer.observe`; the last occurrence of a token counts."""
        found = zip(likeliest.tokens.tolist(), likeliest.log_probabilities.tolist(), strict=True)
        self._matrices[row].update(zip(tokens.tolist(), found, strict=True))

    def propose(self, turns: Mapping[int, Turn]) -> dict[int, Tree]:
        """See `Proposer.propose`; a chain ends before the first token that was never read, a tree is no wider than
        the matrix."""
        trees = {}
        for row, turn in turns.items():
            device = turn.aux.device
            if isinstance(turn.shape, int):
                trees[row] = Tree.chain(certain(self._chain(row, turn.text[-1], turn.shape), device))
            else:
                trees[row] = self._tree(row, turn.text[-1], turn.shape, device)
        return trees

    def only(self, rows: Sequence[int]) -> None:
        """Drop all other rows."""
        self._matrices = [self._matrices[row] for row in rows]

    def _chain(self, row: int, token: int, lookahead: int) -> list[int]:
        matrix, proposed = self._matrices[row], []
        for _ in range(lookahead):
            token = matrix[token][0][0] if token in matrix else NO_PROPOSAL
            proposed.append(token)
        return proposed

    def _tree(self, row: int, last: int, shape: TreeShape, device: torch.device) -> Tree:
        matrix = self._matrices[row]

        def expand(grown: Growing, nodes: Sequence[int], width: int) -> Candidates:
            width = min(width, self.candidates)
            rows = [matrix.get(last if node == ROOT else grown.tokens[node], ([], [])) for node in nodes]
            tokens = [(found + [NO_PROPOSAL] * width)[:width] for found, _ in rows]
            scores = [(found + [0.0] * width)[:width] for _, found in rows]
            return Candidates(torch.tensor(tokens), torch.tensor(scores))

        return grow(shape, expand, device)
