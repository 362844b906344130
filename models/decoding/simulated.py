"""The simulated walk: acceptance of the target's own text at every lookahead, from one forward.

Greedy text and a chain of greedy proposals: a proposal is accepted exactly when it equals the text's next token, so the
counts are those of real decoding. Text drawn from p, after temperature and top-p: a source that proposes greedily
proposes x with certainty, so speculative sampling accepts x with probability p(x) and otherwise draws from p without x.
The text's next token, drawn from p, equals x with exactly that probability and is otherwise distributed exactly like
that, so the walk over sampled text is speculative sampling itself, not an estimate of it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from models.decoding.acceptance import AcceptedCounts
from models.decoding.plain import likeliest_after
from models.drafts.batched_proposer import ProposalSource, RolloutSource, Turn
from models.drafts.sampling import GREEDY
from models.drafts.trees import NO_PROPOSAL, Likeliest
from models.targets.model import TargetModel


def features(target: TargetModel, tokens: Sequence[int]) -> Tensor:
    """`[T, K*H]` target features of all but the last of `T + 1` tokens, from one forward."""
    return target.forward(torch.tensor([list(tokens[:-1])], device=target.device)).aux[0]


def features_and_likeliest(target: TargetModel, tokens: Sequence[int], candidates: int) -> tuple[Tensor, Likeliest]:
    """`features`, and the target's most likely tokens after each of these positions, from the same forward."""
    states = target.forward(torch.tensor([list(tokens[:-1])], device=target.device))
    return states.aux[0], likeliest_after(target, states.last[0], candidates)


@torch.no_grad()
def simulate(
    source: ProposalSource,
    prompt: Sequence[int],
    continuation: Sequence[int],
    aux: Tensor,
    max_lookahead: int,
    likeliest: Likeliest | None = None,
) -> tuple[AcceptedCounts, ...]:
    """Walk over a continuation at every lookahead 1..max_lookahead.

    Relies on a chain: the first proposals do not depend on how many follow. A source without a rollout observes and
    proposes position by position, as in real decoding.

    Args:
        source: what proposes.
        prompt: P token ids, at least 1.
        continuation: N token ids of the target's own, the prefill token first.
        aux: `[P + N - 1, K*H]` from `features`.
        max_lookahead: largest lookahead.
        likeliest: the target's most likely tokens at each row of `aux`, for a source without a rollout.

    Returns:
        Counts for lookahead 1..max_lookahead, in that order.
    """
    text = [*prompt, *continuation]
    assert aux.shape[0] == len(text) - 1
    if len(continuation) < 2:
        return tuple(AcceptedCounts(lookahead, ()) for lookahead in range(1, max_lookahead + 1))
    tokens, first = torch.tensor(text, device=aux.device), len(prompt) - 1
    if isinstance(source, RolloutSource):
        proposals = source.rollout(tokens, aux, max_lookahead)[first:-1]
    else:
        assert likeliest is not None, "a source without a rollout observes the target's likely tokens"
        proposals = _propose_step_by_step(source, text, first, aux, max_lookahead, likeliest)
    agreeing = _agreeing(proposals.cpu(), torch.tensor(continuation))
    return tuple(_walk(agreeing, lookahead) for lookahead in range(1, max_lookahead + 1))


def _propose_step_by_step(
    source: ProposalSource, text: Sequence[int], first: int, aux: Tensor, lookahead: int, likeliest: Likeliest
) -> Tensor:
    """`[N - 1, lookahead]` proposals of rows `first ..` but the last, numbered as in `RolloutSource.rollout`."""
    proposer, tokens = source.proposers(1), torch.tensor(text, device=aux.device)
    proposer.observe(0, tokens[:first], likeliest[:first])
    rows = tokens.new_full((len(aux) - 1 - first, lookahead), NO_PROPOSAL)
    for index, row in enumerate(range(first, len(aux) - 1)):
        newest = slice(row, row + 1)
        proposer.observe(0, tokens[newest], likeliest[newest])
        unread = aux[: row + 1] if row == first else aux[newest]
        chain = proposer.propose({0: Turn(text[: row + 2], unread, lookahead, GREEDY)})[0].proposals.tokens
        rows[index, : len(chain)] = chain
    return rows


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
