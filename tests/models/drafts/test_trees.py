"""Shapes, growth and masks of trees of proposals."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.drafts.growing_trees import GrowingTrees
from models.drafts.trees import NO_PROPOSAL, DynamicTree, Proposals, Tree, ancestors, depths, parse_shape


def test_shapes_from_text():
    assert parse_shape("dynamic-5-4-16") == DynamicTree(5, 4, 16)
    for text in ("", "3x2x1", "3", "dynamic-5-4", "dynamic-5-4-a", "static-3", "-1"):
        with pytest.raises(ValueError, match="write dynamic-5-4-16"):
            parse_shape(text)
    with pytest.raises(ValueError, match="1 is the least"):
        parse_shape("dynamic-2-0-3")


parents_of_trees = st.lists(st.integers(0, 100), max_size=12).map(
    lambda draws: tuple(draw % (node + 1) - 1 for node, draw in enumerate(draws))
)


@given(parents=parents_of_trees, padding=st.integers(0, 3))
def test_ancestors_and_depths(parents, padding):
    size = len(parents) + 1 + padding
    seen, found = ancestors(parents, size), depths(parents, size)
    for own in range(size):
        path, node = {own}, own
        while 0 < node <= len(parents):
            node = parents[node - 1] + 1
            path.add(node)
        assert set(seen[own].nonzero().flatten().tolist()) == path
        assert found[own] == (len(path) - 1 if own <= len(parents) else 0)


def logits_after(texts: torch.Tensor) -> torch.Tensor:
    """`[w, 9]`, of tokens 3 to 11, by texts `[w, t]`."""
    seeds = [hash(tuple(text)) % 2**31 for text in texts.tolist()]
    return torch.stack([torch.randn(9, generator=torch.Generator().manual_seed(seed)) for seed in seeds])


@given(seed=st.integers(0, 999), depth=st.integers(1, 4), topk=st.integers(1, 4), tokens=st.integers(1, 20))
def test_a_dynamic_tree_keeps_the_likeliest_of_all_it_has_seen(seed, depth, topk, tokens):
    """Against a slow search over paths; two texts grow together."""
    trees, texts = GrowingTrees(2, topk, torch.device("cpu")), torch.tensor([[[seed]], [[seed + 1]]])
    for level in range(depth):
        if level:
            beams = trees.descend()
            before = texts.take_along_dim(beams.parents.unsqueeze(-1), dim=1)
            texts = torch.cat([before, beams.tokens.unsqueeze(-1)], dim=-1)
        trees.add(texts, logits_after, torch.arange(3, 12))
    for text, tree in zip((seed, seed + 1), trees.kept(tokens), strict=True):
        beam, seen = [((), 0.0)], []
        for _ in range(depth):
            below = []
            for path, score in beam:
                found = logits_after(torch.tensor([[text, *path]]))[0].log_softmax(-1).tolist()
                below += [((*path, 3 + place), score + found[place]) for place in best_places(found)[:topk]]
            seen += below
            beam = sorted(below, key=lambda each: -each[1])[:topk]
        best = {path for path, _ in sorted(seen, key=lambda each: -each[1])[:tokens]}
        assert set(paths_of(tree)) == best
        assert len(tree.parents) == len(best)


def best_places(scores: list[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda place: -scores[place])


def paths_of(tree: Tree) -> list[tuple[int, ...]]:
    paths = []
    for token, parent in zip(tree.proposals.tokens.tolist(), tree.parents, strict=True):
        assert parent < len(paths)
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def test_a_chain_is_a_tree():
    chain = Tree.chain(Proposals(torch.tensor([4, 7, NO_PROPOSAL, 2]), None))
    assert (paths_of(chain), chain.is_chain) == ([(4,), (4, 7)], True)
    assert not Tree(Proposals(torch.tensor([4, 7]), None), (-1, -1)).is_chain
