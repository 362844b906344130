"""Greedy proposals for sampled text: SGLang's default, where the target's own draw decides whether one is accepted."""

from collections.abc import Mapping
from dataclasses import replace

from models.drafts.batched_proposer import ProposalSource, Proposer, Turn
from models.drafts.sampling import GREEDY
from models.drafts.trees import Tree


class ProposesCertainly:
    """A source that proposes its likeliest tokens, with certainty, also where the text is sampled."""

    def __init__(self, source: ProposalSource):
        self.source = source

    def proposers(self, count: int) -> Proposer:
        """See `ProposalSource.proposers`."""
        return _Certain(self.source.proposers(count))


class _Certain:
    def __init__(self, batch: Proposer):
        self.batch, self.branches, self.candidates = batch, batch.branches, batch.candidates
        self.observe, self.only = batch.observe, batch.only

    def propose(self, turns: Mapping[int, Turn]) -> dict[int, Tree]:
        return self.batch.propose({row: replace(turn, sampling=GREEDY) for row, turn in turns.items()})
