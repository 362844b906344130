"""Shapes, growth and masks of trees of proposals."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.drafts.sampling import Sampling
from models.drafts.trees import (
    NO_PROPOSAL,
    Candidates,
    DynamicTree,
    Proposals,
    StaticTree,
    Tree,
    ancestors,
    depths,
    drawn_children,
    grow,
    parse_shape,
)

CPU = torch.device("cpu")


def test_shapes_from_text():
    assert parse_shape("2x1") == StaticTree(((0,), (1,), (0, 0), (1, 0)))
    assert parse_shape("3") == StaticTree.branching([3])
    assert parse_shape("dynamic-5-4-16") == DynamicTree(5, 4, 16)
    for text in ("", "2x0", "2xa", "dynamic-5-4", "static-3", "-1"):
        with pytest.raises(ValueError, match="3x2x1"):
            parse_shape(text)


def test_shapes_with_holes_are_refused():
    for paths in (((1,),), ((0,), (1, 0)), ((0,), (0,)), ((),), ((0,), (0, 1))):
        with pytest.raises(ValueError, match="with its parent"):
            StaticTree(paths)
    with pytest.raises(ValueError, match="1 is the least"):
        DynamicTree(2, 0, 3)


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


def candidates_of(seed: int, share_missing: float):
    """An expansion that depends on the path alone, with scores, and some places that have no candidates."""

    def expand(grown, nodes, width):
        rows = []
        for last in nodes:
            path, node = 1, last
            while node >= 0:
                path, node = path * 31 + grown.tokens[node] + 1, grown.parents[node]
            generator = torch.Generator().manual_seed(path % 100_003 + seed)
            missing = torch.rand(1, generator=generator).item() < share_missing
            tokens = torch.randperm(9, generator=generator)[:width]
            rows.append((tokens if not missing else torch.full((width,), NO_PROPOSAL), scores_of(generator, width)))
        tokens, scores = zip(*rows, strict=True)
        return Candidates(torch.stack(tokens), torch.stack(scores))

    return expand


def scores_of(generator: torch.Generator, width: int) -> torch.Tensor:
    return torch.rand(width, generator=generator).log().sort(descending=True).values


@given(seed=st.integers(0, 999), depth=st.integers(1, 4), topk=st.integers(1, 4), tokens=st.integers(1, 20))
def test_a_dynamic_tree_keeps_the_likeliest_of_all_it_has_seen(seed, depth, topk, tokens):
    """Against a slow search over paths."""
    expand = candidates_of(seed, 0.1)
    tree = grow(DynamicTree(depth, topk, tokens), expand, CPU)

    class Path:
        """A tree of one path, as much as the expansion asks of one that grows."""

        def __init__(self, tokens):
            self.tokens, self.parents = tokens, list(range(-1, len(tokens) - 1))

    level, seen = [((), 0.0)], []
    for _ in range(depth):
        below = []
        for path, score in level:
            found = expand(Path(path), [len(path) - 1], topk)
            for token, more in zip(found.tokens[0].tolist(), found.scores[0].tolist(), strict=True):
                if token != NO_PROPOSAL:
                    below.append(((*path, token), score + more))
        seen += below
        level = sorted(below, key=lambda each: -each[1])[:topk]
    best = {path for path, _ in sorted(seen, key=lambda each: -each[1])[:tokens]}
    assert set(paths_of(tree)) == best
    assert len(tree.parents) == len(best)


def paths_of(tree: Tree) -> list[tuple[int, ...]]:
    paths = []
    for token, parent in zip(tree.proposals.tokens.tolist(), tree.parents, strict=True):
        assert parent < len(paths)
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def test_a_static_tree_leaves_out_what_has_no_candidate():
    def expand(grown, nodes, width):
        if nodes == [-1]:
            return Candidates(torch.tensor([[5, 6, NO_PROPOSAL]]), torch.zeros(1, 3))
        tokens = [[7, 8] if grown.tokens[node] == 5 else [NO_PROPOSAL, NO_PROPOSAL] for node in nodes]
        return Candidates(torch.tensor(tokens), torch.zeros(len(nodes), 2))

    tree = grow(StaticTree.branching([3, 2]), expand, CPU)
    assert paths_of(tree) == [(5,), (6,), (5, 7), (5, 8)]


def test_siblings_are_drawn_without_replacement():
    """Stated distributions are those that earlier siblings leave; of two possible tokens there is no third child."""
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log().expand(20_000, -1)
    ids = torch.tensor([1, 4, 6])
    sampling = Sampling(1.0, generator=torch.Generator().manual_seed(1))
    found = drawn_children(logits, ids, 3, 8, sampling)
    assert bool((found.tokens.sort(-1).values == ids).all())
    first, second, third = found.drawn_from.unbind(1)
    assert torch.allclose(first[:, ids], logits.exp())
    after_four = second[found.tokens[:, 0] == 4][0]
    assert torch.allclose(after_four[ids], torch.tensor([5 / 7, 0.0, 2 / 7]))
    assert bool((third.max(-1).values == 1).all())
    share = (found.tokens[found.tokens[:, 0] == 4][:, 1] == 1).double().mean()
    assert abs(share - 5 / 7) < 0.03
    two = logits[:50] + torch.tensor([0.0, 0.0, -torch.inf])
    narrow = drawn_children(two, ids, 3, 8, Sampling(1.0, generator=torch.Generator().manual_seed(1)))
    assert bool((narrow.tokens[:, 2] == NO_PROPOSAL).all())
    assert bool((narrow.tokens[:, :2].sort(-1).values == torch.tensor([1, 4])).all())


def test_a_chain_is_a_tree():
    chain = Tree.chain(Proposals(torch.tensor([4, 7, NO_PROPOSAL, 2]), None))
    assert (paths_of(chain), chain.is_chain) == ([(4,), (4, 7)], True)
    assert not Tree(Proposals(torch.tensor([4, 7]), None), (-1, -1)).is_chain
