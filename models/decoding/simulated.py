"""The simulated walk: acceptance of the target's own text at every lookahead, from one forward.

Greedy text and a chain of greedy proposals: a proposal is accepted exactly when it equals the text's next token, so the
counts are those of real decoding. Text drawn from p, after temperature, top-k and top-p: a greedy source
proposes x with certainty, so speculative sampling accepts x with probability p(x) and otherwise draws from p without x.
The text's next token, drawn from p, equals x with exactly that probability and is otherwise distributed exactly like
that, so the walk over sampled text is speculative sampling itself, not an estimate of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from models.decoding.acceptance import AcceptedCounts
from models.decoding.plain import ROWS
from models.drafts.batched_proposer import ProposalSource, RolloutSource, Turn
from models.drafts.sampling import GREEDY, Sampling
from models.drafts.trees import NO_PROPOSAL
from models.targets.hidden_states import HiddenStates
from models.targets.model import TargetModel


def features(target: TargetModel, tokens: Sequence[int]) -> Tensor:
    """`[T, K*H]` target features of all but the last of `T + 1` tokens, from one forward."""
    return target.forward(torch.tensor([list(tokens[:-1])], device=target.device)).features[0]


@dataclass(frozen=True)
class TextReading:
    """What the target says of a text of T + 1 tokens."""

    following: Tensor
    """`[T]` int64, the text without its first token."""
    aux: Tensor
    """`[T, K*H]`, as of `features`."""
    likeliest: Tensor | None
    """`[T, candidates]` int64, its most likely tokens after each of these positions; None: not wanted."""
    chances: Tensor
    """`[n]` float32: its probability of each of the text's last n tokens, those that are wanted."""


@torch.no_grad()
def read_texts(
    target: TargetModel,
    texts: Sequence[Sequence[int]],
    *,
    candidates: int = 0,
    sampled: Sequence[int] = (),
    sampling: Sampling = GREEDY,
) -> list[TextReading]:
    """Read texts of at least 2 tokens by one forward of all; shorter ones are padded at their ends.

    Args:
        target: the target.
        texts: token ids.
        candidates: how many likely tokens are wanted of each position.
        sampled: of how many last tokens of each text the probability is wanted; empty: of none.
        sampling: temperature, top-k and top-p of these probabilities.
    """
    tokens = [torch.tensor(list(text), device=target.device) for text in texts]
    states = target.forward(pad_sequence([text[:-1] for text in tokens], batch_first=True))
    return [
        _reading(
            target, text, HiddenStates(states.aux[row, : len(text) - 1], states.last[row, : len(text) - 1]), candidates,
            wanted, sampling,
        )
        for row, (text, wanted) in enumerate(zip(tokens, sampled or [0] * len(texts), strict=True))
    ]  # fmt: skip


@torch.no_grad()
def read_seen(
    target: TargetModel,
    text: Sequence[int],
    seen: Mapping[str, Tensor],
    *,
    candidates: int = 0,
    sampled: int = 0,
    sampling: Sampling = GREEDY,
) -> tuple[TextReading, HiddenStates]:
    """Read one text with images, which the model reads as `seen`; and its hidden states, with what was embedded.

    Other arguments: as of `read_texts`, for one text.
    """
    tokens = torch.tensor(list(text), device=target.device)
    states = target.forward(tokens[None, :-1], seen=seen, embedded=True)
    hidden = HiddenStates(**{name: rows[0] for name, rows in states.named().items()})
    return _reading(target, tokens, hidden, candidates, sampled, sampling), hidden


def _reading(
    target: TargetModel, text: Tensor, hidden: HiddenStates, candidates: int, wanted: int, sampling: Sampling
) -> TextReading:
    following, aux, last = text[1:], hidden.features, hidden.last
    best, chances = list[Tensor](), [aux.new_empty(0, dtype=torch.float32)]
    first = len(last) - wanted
    for rows in torch.arange(0 if candidates else first, len(last), device=target.device).split(ROWS):
        logits, own = target.logits(last[rows]), rows[rows >= first]
        if candidates:
            best.append(logits.topk(candidates).indices)
        if len(own):
            after = sampling.distribution(logits[-len(own) :])
            chances.append(after.gather(-1, following[own].unsqueeze(-1)).squeeze(-1))
    return TextReading(following, aux, torch.cat(best) if best else None, torch.cat(chances))


@torch.no_grad()
def simulate(
    source: ProposalSource,
    prompt: Sequence[int],
    continuation: Sequence[int],
    aux: Tensor,
    max_lookahead: int,
    known: Tensor | None = None,
    *,
    eos_ids: frozenset[int],
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
        known: the target's most likely tokens at each row of `aux`, for a source without a rollout.
        eos_ids: tokens that end a text; one that ends otherwise was cut by the maximum length.

    Returns:
        Counts for lookahead 1..max_lookahead, in that order.
    """
    text = [*prompt, *continuation]
    assert aux.shape[0] == len(text) - 1
    if len(continuation) < 2:
        return tuple(AcceptedCounts(lookahead, ()) for lookahead in range(1, max_lookahead + 1))
    tokens, first = torch.tensor(text, device=aux.device), len(prompt) - 1
    if isinstance(source, RolloutSource):
        proposals = source.rollout(tokens, aux, max_lookahead, first)[:-1]
    else:
        assert known is not None, "a source without a rollout observes the target's likely tokens"
        proposals = _propose_step_by_step(source, text, first, aux, max_lookahead, known)
    agreeing = _agreeing(proposals.cpu(), torch.tensor(continuation))
    ended = continuation[-1] in eos_ids
    return tuple(walk_chain(agreeing, lookahead, ended=ended) for lookahead in range(1, max_lookahead + 1))


def _propose_step_by_step(
    source: ProposalSource, text: Sequence[int], first: int, aux: Tensor, lookahead: int, known: Tensor
) -> Tensor:
    """`[N - 1, lookahead]` proposals of rows `first ..` but the last, numbered as in `RolloutSource.rollout`."""
    proposer, tokens = source.proposers(1), torch.tensor(text, device=aux.device)
    proposer.observe(0, tokens[:first], known[:first])
    rows = tokens.new_full((len(aux) - 1 - first, lookahead), NO_PROPOSAL)
    for index, row in enumerate(range(first, len(aux) - 1)):
        newest = slice(row, row + 1)
        proposer.observe(0, tokens[newest], known[newest])
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


def walk_chain(agreeing: Sequence[int], lookahead: int, *, ended: bool) -> AcceptedCounts:
    """Counts of a text's steps, from how many proposals equal it after each of its tokens but the last.

    `ended`: the last one ends the text.
    """
    accepted: list[int] = []
    place = 0
    while place < len(agreeing):
        count = min(agreeing[place], lookahead)
        if place + count + 1 > len(agreeing):
            return AcceptedCounts(lookahead, tuple(accepted), int(not ended), count if ended else 0)
        accepted.append(count)
        place += count + 1
    return AcceptedCounts(lookahead, tuple(accepted))
