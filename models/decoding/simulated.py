"""The simulated walk: acceptance of the target's own text at every lookahead, from one forward. Runs in benchmarks.

Greedy text and a chain of greedy proposals: a proposal is accepted exactly when it equals the text's next token, so the
counts are those of real decoding. Text drawn from p, after temperature and top-p: a source that proposes greedily
proposes x with certainty, so speculative sampling accepts x with probability p(x) and otherwise draws from p without x.
The text's next token, drawn from p, equals x with exactly that probability and is otherwise distributed exactly like
that, so the walk over sampled text is speculative sampling itself, not an estimate of it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from models.decoding.counts import AcceptedCounts
from models.decoding.observing import likeliest_after
from models.drafts.batched_proposer import ObservingSource, RolloutSource
from models.drafts.proposals import Likeliest
from models.targets.model import TargetModel


def features(target: TargetModel, tokens: Sequence[int]) -> Tensor:
    """`[T, K*H]` target features of all but the last of `T + 1` tokens, from one forward."""
    return target.forward(torch.tensor([list(tokens[:-1])], device=target.device)).aux[0]


def features_and_likeliest(target: TargetModel, tokens: Sequence[int], candidates: int) -> tuple[Tensor, Likeliest]:
    """`features`, and what the target finds likely after each of these positions, from the same forward."""
    states = target.forward(torch.tensor([list(tokens[:-1])], device=target.device))
    return states.aux[0], likeliest_after(target, states.last[0], candidates)


@torch.no_grad()
def simulate(
    source: RolloutSource | ObservingSource,
    prompt: Sequence[int],
    continuation: Sequence[int],
    aux: Tensor,
    max_lookahead: int,
    likeliest: Likeliest | None = None,
) -> tuple[AcceptedCounts, ...]:
    """Walk over a continuation at every lookahead 1..max_lookahead.

    Relies on a chain: the first proposals do not depend on how many follow. An observing source is told of position
    after position as in real decoding, and proposes at each.

    Args:
        source: what proposes.
        prompt: P token ids, at least 1.
        continuation: N token ids of the target's own, the prefill token first.
        aux: `[P + N - 1, K*H]` from `features`.
        max_lookahead: largest lookahead.
        likeliest: what the target found likely at each row of `aux`; only an observing source needs it.

    Returns:
        Counts for lookahead 1..max_lookahead, in that order.
    """
    text = [*prompt, *continuation]
    assert aux.shape[0] == len(text) - 1
    if len(continuation) < 2:
        return tuple(AcceptedCounts(lookahead, ()) for lookahead in range(1, max_lookahead + 1))
    tokens, first = torch.tensor(text, device=aux.device), len(prompt) - 1
    if isinstance(source, ObservingSource):
        assert likeliest is not None, "an observing source walks with what the target found likely"
        proposals = _propose_on_the_way(source, tokens, first, aux, max_lookahead, likeliest)
    else:
        proposals = source.rollout(tokens, aux, max_lookahead)[first:-1]
    agreeing = _agreeing(proposals.cpu(), torch.tensor(continuation))
    return tuple(_walk(agreeing, lookahead) for lookahead in range(1, max_lookahead + 1))


def _propose_on_the_way(
    source: ObservingSource, tokens: Tensor, first: int, aux: Tensor, lookahead: int, likeliest: Likeliest
) -> Tensor:
    """`[N - 1, lookahead]` proposals of rows `first ..` but the last, as `ProposalSource.rollout` counts rows."""
    proposer = source.proposer()
    proposer.observe(tokens[:first], likeliest[:first])
    rows = []
    for row in range(first, len(aux) - 1):
        here = slice(row, row + 1)
        proposer.observe(tokens[here], likeliest[here])
        rows.append(proposer.propose(tokens[: row + 2], aux[: row + 1] if row == first else aux[here], lookahead))
    return torch.stack(rows)


def _agreeing(proposals: Tensor, continuation: Tensor) -> list[int]:
    """How many leading proposals equal the text, from each of its N tokens but the last: `[N - 1, L]` to N - 1."""
    lookahead = proposals.shape[1]
    # -2 is no token and not NO_PROPOSAL either: nothing agrees beyond the end of the text.
    padded = torch.cat([continuation[1:], torch.full((lookahead,), -2)])
    following = padded.unfold(0, lookahead, 1)[: len(proposals)]
    return (proposals == following).cumprod(dim=1).sum(dim=1).tolist()


def _walk(agreeing: list[int], lookahead: int) -> AcceptedCounts:
    accepted: list[int] = []
    place = 0
    while place < len(agreeing):
        count = min(agreeing[place], lookahead)
        if place + count + 1 > len(agreeing):
            return AcceptedCounts(lookahead, tuple(accepted), cut=1)
        accepted.append(count)
        place += count + 1
    return AcceptedCounts(lookahead, tuple(accepted))
