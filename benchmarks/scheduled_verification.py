"""Verification of as many proposals as pay, by the draft's own confidence (DSpark, arXiv 2607.05147, algorithm 1).

Of all texts' proposals those are verified first that are likeliest to be reached and accepted, as long as the expected
tokens per second grow. The first proposal that lowers them ends the search, so what a proposal is never decides whether
it is verified: the text stays the target's. A search for the best of all sizes would look at confidences that depend on
the very proposals that it admits; its text follows another distribution (the paper's appendix A).
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from infra.records.goodput import CostFit
from models.decoding.goodput import FittedCosts
from models.drafts.batched_proposer import ChangedTurns, ProposalSource, Proposer, Turn
from models.drafts.trees import Proposals, Tree

Schedule = Callable[[Tensor, Callable[[int], float]], list[int]]
"""(see `admitted`)"""


def ragged_seconds(cost: CostFit, batch: int, total: float, longest: int) -> float:
    """`total` tokens of `batch` texts, at most `longest` (2 or more) of each.

    What several tokens cost beside their number is paid whatever the total, as in SGLang's tables: otherwise the
    first proposal alone would have to earn it.
    """
    whole = batch * longest
    saved = cost.per_token * (whole - total)
    saved += cost.per_token_beyond * (max(0.0, whole - cost.knee) - max(0.0, total - cost.knee))
    return cost.seconds(batch, longest) - saved


def admitted(survivals: Tensor, seconds: Callable[[int], float]) -> list[int]:
    """How many proposals of each of R texts are verified.

    Args:
        survivals: `[R, S]` the chance that each proposal is reached and accepted; rows do not ascend. 0 where a chain
            has ended.
        seconds: of a step that verifies so many tokens of all texts, the last known one of each text included.
    """
    texts, longest = survivals.shape
    lengths, verified, emitted = [0] * texts, texts, float(texts)
    best = emitted / seconds(verified)
    order = survivals.flatten().sort(descending=True, stable=True)
    for chance, place in zip(order.values.tolist(), order.indices.tolist(), strict=True):
        if chance <= 0:
            break
        verified, emitted = verified + 1, emitted + chance
        speed = emitted / seconds(verified)
        if speed < best:
            break
        best = speed
        lengths[place // longest] += 1
    return lengths


class Scheduled:
    """A draft whose proposals are verified as far as they pay: a `ProposalSource`.

    Args:
        source: the draft; its proposers tell confidences.
        costs: of steps, by which a batch's size decides.
        temperatures: S calibrated temperatures of confidences, see `models.decoding.calibration`.
        schedule: what decides.
    """

    def __init__(
        self,
        source: ProposalSource,
        costs: FittedCosts,
        temperatures: Sequence[float],
        schedule: Schedule = admitted,
    ):
        self.source, self.costs, self.schedule = source, costs, schedule
        self.temperatures = torch.tensor(temperatures, dtype=torch.double)

    def proposers(self, count: int) -> "ScheduledProposer":
        return ScheduledProposer(self, self.source.proposers(count))


class ScheduledProposer(ChangedTurns):
    """Shortens the chains of another proposer (see `Proposer`)."""

    def __init__(self, scheduled: Scheduled, batch: Proposer):
        super().__init__(batch, lambda turn: turn)
        self.scheduled = scheduled

    def propose(self, turns: Mapping[int, Turn]) -> dict[int, Tree]:
        """See `Proposer.propose`; at most as many tokens as the turns want."""
        chains = super().propose(turns)
        rows, confidences = list(chains), self.confidences
        assert confidences is not None, "a draft with a confidence head"
        lengths = torch.tensor([len(chains[row].parents) for row in rows])
        longest, temperatures = int(lengths.max()), self.scheduled.temperatures
        assert longest <= len(temperatures)
        scaled = confidences[rows, :longest].cpu().double() / temperatures[:longest]
        survivals = scaled.sigmoid().cumprod(-1) * (torch.arange(longest) < lengths[:, None])
        drafting = self.scheduled.costs.draft.seconds(len(rows), longest)

        def seconds(verified: int) -> float:
            return drafting + ragged_seconds(self.scheduled.costs.target, len(rows), verified, longest + 1)

        kept = self.scheduled.schedule(survivals, seconds)
        return {row: _beginning(chains[row], count) for row, count in zip(rows, kept, strict=True)}


def _beginning(chain: Tree, count: int) -> Tree:
    """The first `count` proposals of a chain."""
    drawn_from = chain.proposals.probabilities
    proposals = Proposals(chain.proposals.tokens[:count], None if drawn_from is None else drawn_from[:count])
    return Tree(proposals, chain.parents[:count])
