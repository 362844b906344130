"""Proposed tokens, and the target's judgement of them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NO_PROPOSAL = -1
"""Stands where a source has nothing to propose; neither it nor anything after it is verified or accepted."""


@dataclass(frozen=True)
class Proposals:
    """k proposed tokens and what they were drawn from."""

    tokens: Tensor
    """`[k]` int64, target-vocabulary ids."""
    probabilities: Tensor | None
    """`[k, V]` over the target's vocabulary, row i given the proposals before it: at most 7 MB for a lookahead of 7
    and 262,144 tokens in float32. None: proposed with certainty."""

    def usable(self) -> "Proposals":
        """Those before the first `NO_PROPOSAL`."""
        tokens = self.tokens.tolist()
        if NO_PROPOSAL not in tokens:
            return self
        count = tokens.index(NO_PROPOSAL)
        return Proposals(self.tokens[:count], None if self.probabilities is None else self.probabilities[:count])

    def over(self, vocabulary: int) -> Tensor:
        """`[k, V]` the distributions; one-hot for proposals with certainty. All tokens must be real ones."""
        if self.probabilities is None:
            certain = torch.zeros(len(self.tokens), vocabulary, device=self.tokens.device)
            return certain.scatter_(1, self.tokens.unsqueeze(-1), 1.0)
        assert self.probabilities.shape == (len(self.tokens), vocabulary)
        return self.probabilities


def certain(tokens: Sequence[int], device: torch.device) -> Proposals:
    """Tokens proposed with certainty."""
    return Proposals(torch.tensor(tokens, dtype=torch.long, device=device), None)


@dataclass(frozen=True)
class Likeliest:
    """The target's k likeliest next tokens after n positions, best first."""

    tokens: Tensor
    """`[n, k]` int64."""
    log_probabilities: Tensor
    """`[n, k]` float32, over the whole vocabulary."""

    def __getitem__(self, rows: slice) -> "Likeliest":
        return Likeliest(self.tokens[rows], self.log_probabilities[rows])
