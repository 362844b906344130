"""Greedy proposals for sampled text: SGLang's default, where the target's own draw decides whether one is accepted."""

from dataclasses import replace

from models.drafts.batched_proposer import ChangedTurns, ProposalSource
from models.drafts.sampling import GREEDY


class ProposesCertainly:
    """A source that proposes its likeliest tokens, with certainty, also where the text is sampled."""

    def __init__(self, source: ProposalSource):
        self.source = source

    def proposers(self, count: int) -> ChangedTurns:
        """See `ProposalSource.proposers`."""
        return ChangedTurns(self.source.proposers(count), lambda turn: replace(turn, sampling=GREEDY))
