"""Token Recycling (arXiv 2408.08696), a baseline that needs no training: propose what the target had in mind before.

Runs in benchmarks. Whenever the target has read a token, the tokens that it found likely to follow are kept in that
token's row of an adjacency matrix, in place of older ones; proposals go from row to row. A chain takes the best
candidate each time, a tree the first ones, breadth first.

Here a row changes only when its token stands on the text, prompt included (the paper also keeps what followed rejected
proposals), and every text starts with an empty matrix (the paper's goes from one text to the next). So proposals
depend on the text so far alone, whatever was proposed before, and other prompts cannot change a figure.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from models.drafts.batched_proposer import ObservingProposer, ObservingSource
from models.drafts.proposals import NO_PROPOSAL, Likeliest, Proposals
from models.drafts.sampling import Sampling
from models.drafts.trees import ROOT, Candidates, Growing, Tree, TreeShape, grow

CANDIDATES = 8


class TokenRecycling(ObservingSource):
    """Proposes from the conversation's own text and what the target said along it."""

    def __init__(self, candidates: int = CANDIDATES):
        self.candidates = candidates

    def proposer(self) -> "TokenRecyclingProposer":
        return TokenRecyclingProposer(self.candidates)


class TokenRecyclingProposer(ObservingProposer):
    """Token Recycling for one sequence; proposes with certainty, ignores features."""

    def __init__(self, candidates: int = CANDIDATES):
        self.candidates = candidates
        self._following: dict[int, tuple[list[int], list[float]]] = {}
        """The adjacency matrix: rows of tokens that were read, candidates and their log-probabilities."""

    def observe(self, tokens: Tensor, likeliest: Likeliest) -> None:
        """See `models.drafts.base.ObservingProposer.observe`; the last place of a token counts."""
        rows = zip(likeliest.tokens.tolist(), likeliest.log_probabilities.tolist(), strict=True)
        self._following.update(zip(tokens.tolist(), rows, strict=True))

    def propose(self, sequence: Tensor, aux: Tensor, lookahead: int) -> Tensor:
        """`[lookahead]` int64; `NO_PROPOSAL` from the first token on that was never read before."""
        proposed, token = [], int(sequence[-1])
        for _ in range(lookahead):
            token = self._following[token][0][0] if token in self._following else NO_PROPOSAL
            proposed.append(token)
        return torch.tensor(proposed, dtype=torch.long, device=sequence.device)

    def sample(self, sequence: Tensor, aux: Tensor, lookahead: int, sampling: Sampling) -> Proposals:
        """The same proposals, with certainty."""
        return Proposals(self.propose(sequence, aux, lookahead), None)

    def propose_tree(self, sequence: Tensor, aux: Tensor, shape: TreeShape, sampling: Sampling) -> Tree:
        """See `models.drafts.trees.TreeProposer.propose_tree`; not wider than the matrix."""
        last = int(sequence[-1])

        def expand(grown: Growing, nodes: Sequence[int], width: int) -> Candidates:
            width = min(width, self.candidates)
            rows = [self._following.get(last if node == ROOT else grown.tokens[node], ([], [])) for node in nodes]
            tokens = [(found + [NO_PROPOSAL] * width)[:width] for found, _ in rows]
            scores = [(found + [0.0] * width)[:width] for _, found in rows]
            return Candidates(torch.tensor(tokens), torch.tensor(scores))

        return grow(shape, expand, sequence.device)
