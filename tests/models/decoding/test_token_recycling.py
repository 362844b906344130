import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from models.decoding.token_recycling import TokenRecycling, TokenRecyclingProposer
from models.drafts.batched_proposer import Turn
from models.drafts.sampling import GREEDY
from models.drafts.trees import Proposals

NOTHING = torch.empty(0, 0)


def proposed(proposer: TokenRecyclingProposer, text: list[int], lookahead: int) -> Proposals:
    """What the only text's proposer says after a text."""
    tree = proposer.propose({0: Turn(text, NOTHING, lookahead, GREEDY)})[0]
    assert tree.is_chain
    return tree.proposals


def observed(seed: int, count: int) -> Tensor:
    """The likeliest token after each of `count` positions."""
    return torch.randint(6, (count, 1), generator=torch.Generator().manual_seed(seed))


def slow_successor(text: list[int], likeliest: Tensor, read: int, token: int) -> int | None:
    """What was likeliest after the last place of `token` among the first `read` positions."""
    for place in range(read - 1, -1, -1):
        if text[place] == token:
            return int(likeliest[place])
    return None


@given(text=st.lists(st.integers(0, 5), min_size=2, max_size=24), seed=st.integers(0, 99), at_once=st.integers(1, 5))
def test_a_chain_follows_the_last_place_of_each_token(text, seed, at_once):
    """However many positions are observed at a time: the newest place of each token counts, as a search would say."""
    likeliest, proposer = observed(seed, len(text) - 1), TokenRecycling().proposers(1)
    for start in range(0, len(text) - 1, at_once):
        read = min(start + at_once, len(text) - 1)
        proposer.observe(0, torch.tensor(text[start:read]), likeliest[start:read])
        chain, token = [], text[read]
        while len(chain) < 4 and (token := slow_successor(text, likeliest, read, token)) is not None:
            chain.append(token)
        found = proposed(proposer, text[: read + 1], 4)
        assert (found.tokens.tolist(), found.probabilities) == (chain, None)


def test_every_conversation_has_its_own_successors():
    source = TokenRecycling()
    batch = source.proposers(2)
    batch.observe(0, torch.tensor([1, 2]), observed(0, 2))
    assert batch.propose({1: Turn([2, 1], NOTHING, 2, GREEDY)})[1].parents == ()
    assert len(proposed(batch, [2, 1], 1).tokens) == 1
    assert len(proposed(source.proposers(1), [2, 1], 2).tokens) == 0
