"""A draft proposing for one text."""

import pytest
import torch.nn.functional as F
from torch import Tensor

from models.drafts.base import Draft
from models.drafts.batched_proposer import Turn
from models.drafts.sampling import GREEDY, Sampling
from models.drafts.trees import NO_PROPOSAL, DynamicTree, Proposals, Tree


class Alone:
    """The row of a batch of one, with a text's own methods."""

    def __init__(self, draft: Draft):
        self.batch = draft.proposers(1)

    def propose(self, sequence: Tensor, aux: Tensor, lookahead: int) -> Tensor:
        """Greedy proposals `[lookahead]`."""
        return self.sample(sequence, aux, lookahead, GREEDY).tokens

    def sample(self, sequence: Tensor, aux: Tensor, lookahead: int, sampling: Sampling) -> Proposals:
        """Sampled proposals `[lookahead]`."""
        tree = self.batch.propose({0: Turn(sequence.tolist(), aux, lookahead, sampling)})[0]
        found, missing = tree.proposals, lookahead - len(tree.parents)
        rows = None if found.probabilities is None else F.pad(found.probabilities, (0, 0, 0, missing))
        return Proposals(F.pad(found.tokens, (0, missing), value=NO_PROPOSAL), rows)

    def propose_tree(self, sequence: Tensor, aux: Tensor, shape: DynamicTree, sampling: Sampling) -> Tree:
        """A tree of proposals."""
        return self.batch.propose({0: Turn(sequence.tolist(), aux, shape, sampling)})[0]


@pytest.fixture
def alone() -> type[Alone]:
    return Alone
