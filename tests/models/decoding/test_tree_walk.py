"""The walk of dynamic trees counts what decoding with them counts, step by step."""

import pytest
import torch

from models.config.eagle3 import Eagle3Config
from models.decoding.acceptance import AcceptedCounts
from models.decoding.simulated import read_texts
from models.decoding.speculative import speculate, speculate_together
from models.decoding.tree_walk import ranks_of_texts, walk_tree
from models.drafts.base import Draft
from models.drafts.registry import build_draft
from models.drafts.trees import ABSENT, DynamicTree
from models.drafts.vocabulary import DraftVocabulary

VOCABULARY, KNOWN, NEW, DEPTH = 24, 16, 24, 4
NEVER = frozenset[int]()


@pytest.fixture(scope="module")
def draft() -> Draft:
    torch.manual_seed(3)
    config = Eagle3Config(vocab_size=KNOWN, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=32, ttt_steps=2)
    vocabulary = DraftVocabulary(torch.arange(VOCABULARY - KNOWN, VOCABULARY), VOCABULARY)
    return build_draft(config, torch.randn(VOCABULARY, 32), vocabulary, (0, 1))


@pytest.mark.parametrize("topk", [1, 2, 4])
def test_it_counts_as_real_decoding_does(llama, draft, topk):
    """Prompts of several lengths read together, one of a single token."""
    target = llama(21, VOCABULARY)
    with torch.no_grad():
        draft.start_from(target.head_weight)
    prompts = [torch.randint(VOCABULARY, (1 + 3 * at,)).tolist() for at in range(6)]
    texts = [list(speculate(target, draft, prompt, 0, NEW, NEVER).tokens) for prompt in prompts]
    readings = read_texts(target, [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)])
    ranks = ranks_of_texts(draft, readings, [NEW] * len(prompts), topk, DEPTH)  # type: ignore[arg-type]
    accepted = 0
    for depth, tokens in [(1, 1), (2, 4), (4, 4), (4, 9), (3, 16)]:
        shape = DynamicTree(depth, topk, tokens)
        together = speculate_together(target, draft, prompts, shape, NEW, NEVER)
        for prompt, of_text, real in zip(prompts, ranks, together, strict=True):
            assert walk_tree(of_text, depth, tokens, ended=False) == real.counts
            assert speculate(target, draft, prompt, shape, NEW, NEVER) == real
            accepted += sum(real.counts.accepted)
    assert accepted > 20


def test_a_step_that_accepts_the_end_of_a_text_is_complete():
    ranks = torch.tensor([[[0, ABSENT], [0, ABSENT]]])
    assert walk_tree(ranks, 2, 3, ended=True) == AcceptedCounts(2, (), ended=1)
    assert walk_tree(ranks, 2, 3, ended=False) == AcceptedCounts(2, (), cut=1)


def test_a_text_of_its_first_token_has_no_step(llama, draft):
    target = llama(21, VOCABULARY)
    for texts, own in [([[3, 1]], [1]), ([[3, 1], [2, 4, 1, 5, 3]], [1, 4])]:
        first, *others = ranks_of_texts(draft, read_texts(target, texts), own, 2, 3)  # type: ignore[arg-type]
        assert walk_tree(first, 3, 5, ended=True).steps == 0
        assert [len(ranks) for ranks in others] == [count - 1 for count in own[1:]]
