"""EAGLE-3's trees: every place has the distribution that the chain to it would have."""

import pytest
import torch
from torch import Tensor

from models.config.eagle3 import Eagle3Config
from models.drafts.batched_proposer import PackedTexts
from models.drafts.eagle3.module import Eagle3Draft
from models.drafts.sampling import GREEDY, Sampling
from models.drafts.trees import ABSENT, DynamicTree, Tree
from models.drafts.vocabulary import DraftVocabulary

HIDDEN, TARGET_VOCABULARY, AUX = 12, 40, (0, 2)
FULL = ["full_attention"]


def make_draft(known: int = 24, **changes) -> Eagle3Draft:
    torch.manual_seed(3)
    heads = {} if "mla" in changes else {"num_kv_heads": 2, "head_dim": 8}
    config = Eagle3Config(**{"vocab_size": known, "num_heads": 4, "intermediate_size": 20} | heads | changes)
    ids = torch.randperm(TARGET_VOCABULARY)[:known].sort().values
    draft = Eagle3Draft(config, torch.randn(TARGET_VOCABULARY, HIDDEN), DraftVocabulary(ids, TARGET_VOCABULARY), AUX)
    for parameter in draft.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    return draft


def paths_of(tree: Tree) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.proposals.tokens.tolist(), tree.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def after(draft: Eagle3Draft, sequence: Tensor, aux: Tensor, path: tuple[int, ...]) -> Tensor:
    """Log-probabilities over the draft vocabulary after a path, by training's forward over the text with it."""
    text = torch.cat([sequence, torch.tensor(path, dtype=torch.long)])
    rows, steps = len(aux), len(path) + 1
    outputs = list(draft.unroll(text[1 : rows + 1], aux, (rows,), steps, lambda j, _: text.roll(-1 - j)[:rows]))
    return draft.logits(outputs[-1][-1]).log_softmax(-1)


@pytest.fixture
def sequence() -> Tensor:
    return torch.randint(TARGET_VOCABULARY, (10,), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def aux() -> Tensor:
    return torch.randn(9, len(AUX) * HIDDEN, generator=torch.Generator().manual_seed(2))


SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3, "ttt_steps": 2}
MLA = {"mla": {"q_lora_rank": 6, "kv_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 6}}
VARIANTS = [{}, {"norm_output": True, "fc_norm": True}, SLIDING, MLA, {"hidden_size": 8, "layer_types": FULL * 2}]


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_dynamic_trees_hold_the_likeliest_paths(variant, sequence, aux, alone):
    """Against a slow search of the same beam with training's forward."""
    draft = make_draft(**variant)
    proposer = alone(draft)
    proposer.propose(sequence[:6], aux[:5], 3)  # a cache from before
    tree = proposer.propose_tree(sequence, aux[5:], DynamicTree(3, 3, 8), GREEDY)
    level, seen = [((), 0.0)], []
    for _ in range(3):
        below = []
        for path, score in level:
            found = after(draft, sequence, aux, path).topk(3)
            tokens = draft.target_ids[found.indices].tolist()
            below += [((*path, t), score + float(v)) for t, v in zip(tokens, found.values, strict=True)]
        seen += below
        level = sorted(below, key=lambda each: -each[1])[:3]
    best = {path for path, _ in sorted(seen, key=lambda each: -each[1])[:8]}
    assert set(paths_of(tree)) == best
    assert max(map(len, best)) > 1
    chain = alone(draft).propose_tree(sequence, aux, DynamicTree(4, 1, 4), GREEDY)
    assert chain.is_chain
    assert chain.proposals.tokens.tolist() == alone(draft).propose(sequence, aux, 4).tolist()


@torch.no_grad()
def test_sampled_trees_are_greedy_ones_proposed_with_certainty(sequence, aux, alone):
    draft, shape = make_draft(), DynamicTree(2, 3, 6)
    sampled, greedy = (
        alone(draft).propose_tree(sequence, aux, shape, sampling) for sampling in (Sampling(0.7, 0.9), GREEDY)
    )
    assert sampled.proposals.probabilities is None
    assert paths_of(sampled) == paths_of(greedy)


def held(tree: Tree, following: list[int]) -> int:
    """How many of the following tokens a tree holds, one below the other."""
    paths = set(paths_of(tree))
    return sum(tuple(following[: count + 1]) in paths for count in range(len(following)))


@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_ranks_along_texts_say_what_every_tree_would_have_held(variant, alone):
    """Ragged texts, of which the last few tokens are wanted; what the draft does not know is never held."""
    draft, topk, depth = make_draft(known=16, **variant), 3, 3
    generator = torch.Generator().manual_seed(5)
    texts = [draft.target_ids[torch.randint(16, (length,), generator=generator)] for length in (24, 3, 18)]
    texts[2][11] = next(token for token in range(TARGET_VOCABULARY) if token not in draft.target_ids)
    aux = [torch.randn(len(text) - 1, len(AUX) * HIDDEN, generator=generator) for text in texts]
    packed = PackedTexts.of([text[1:] for text in texts], aux)
    rows = [*range(3, 23), *range(23, 25), *range(30, 42)]
    ranks = draft.ranks_along(packed, torch.tensor(rows), topk, depth)
    assert ranks.shape == (len(rows), depth, depth)
    places = [(text, row) for text, length in enumerate(packed.lengths) for row in range(length)]
    seen = 0
    for found, (text, row) in zip(ranks, [places[row] for row in rows], strict=True):
        for deepest, tokens in [(1, 2), (2, 3), (2, 7), (3, 5), (3, 12), (3, 21)]:
            shape = DynamicTree(deepest, topk, tokens)
            tree = alone(draft).propose_tree(texts[text][: row + 2], aux[text][: row + 1], shape, GREEDY)
            own = found[deepest - 1, :deepest]
            in_tree = int(((own != ABSENT) & (own < tokens)).sum())
            assert in_tree == held(tree, texts[text][row + 2 : row + 2 + deepest].tolist())
            seen += in_tree
        assert (found[torch.ones_like(found, dtype=torch.bool).triu(1)] == ABSENT).all()
    assert seen > 5
