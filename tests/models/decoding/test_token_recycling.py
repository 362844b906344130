import torch
from hypothesis import given
from hypothesis import strategies as st

from models.decoding.token_recycling import TokenRecycling, TokenRecyclingProposer
from models.drafts.batched_proposer import Turn
from models.drafts.sampling import GREEDY
from models.drafts.trees import DynamicTree, Likeliest, StaticTree, Tree, TreeShape

NOTHING = torch.empty(0, 0)


def grown(proposer: TokenRecyclingProposer, text: list[int], shape: int | TreeShape) -> Tree:
    """What the only text's proposer says after a text."""
    return proposer.propose({0: Turn(text, NOTHING, shape, GREEDY)})[0]


def observed(seed: int, count: int) -> Likeliest:
    """Three different candidates after each of `count` positions."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.stack([torch.randperm(6, generator=generator)[:3] for _ in range(count)])
    scores = torch.rand(count, 3, generator=generator).log().sort(descending=True).values
    return Likeliest(tokens, scores)


def slow_row(text: list[int], likeliest: Likeliest, read: int, token: int) -> list[int]:
    """Candidates after the last place of `token` among the first `read` positions."""
    for place in range(read - 1, -1, -1):
        if text[place] == token:
            return likeliest.tokens[place].tolist()
    return []


@given(text=st.lists(st.integers(0, 5), min_size=2, max_size=24), seed=st.integers(0, 99), at_once=st.integers(1, 5))
def test_chain_and_tree_follow_the_last_place_of_each_token(text, seed, at_once):
    """However many positions are observed at a time: the newest row of each token counts, as a search would say."""
    likeliest, proposer = observed(seed, len(text) - 1), TokenRecycling().proposers(1)
    for start in range(0, len(text) - 1, at_once):
        read = min(start + at_once, len(text) - 1)
        proposer.observe(0, torch.tensor(text[start:read]), likeliest[start:read])
        chain, token = [], text[read]
        while len(chain) < 4 and (row := slow_row(text, likeliest, read, token)):
            token = row[0]
            chain.append(token)
        assert grown(proposer, text[: read + 1], 4).proposals.tokens.tolist() == chain
        tree = grown(proposer, text[: read + 1], StaticTree.branching([2, 2]))
        expected = [(token, -1) for token in slow_row(text, likeliest, read, text[read])[:2]]
        for parent, (token, _) in enumerate(list(expected)):
            expected += [(child, parent) for child in slow_row(text, likeliest, read, token)[:2]]
        assert list(zip(tree.proposals.tokens.tolist(), tree.parents, strict=True)) == expected
        assert tree.proposals.probabilities is None


def test_a_dynamic_tree_takes_the_likeliest_paths():
    """By hand: 1 (0.9) and its child 2 (0.9 x 0.8) beat the root's second candidate 3 (0.1)."""
    proposer = TokenRecycling().proposers(1)
    shares = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.5, 0.5]])
    proposer.observe(0, torch.tensor([0, 1, 3]), Likeliest(torch.tensor([[1, 3], [2, 0], [4, 5]]), shares.log()))
    tree = grown(proposer, [1, 3, 0], DynamicTree(2, 2, 3))
    assert tree.proposals.tokens.tolist() == [1, 2, 0]
    assert tree.parents == (-1, 0, 0)


def test_every_conversation_has_its_own_matrix():
    source = TokenRecycling()
    batch = source.proposers(2)
    batch.observe(0, torch.tensor([1, 2]), observed(0, 2))
    assert batch.propose({1: Turn([2, 1], NOTHING, 2, GREEDY)})[1].parents == ()
    assert grown(batch, [2, 1], 1).parents == (-1,)
    assert grown(source.proposers(1), [2, 1], 2).parents == ()
