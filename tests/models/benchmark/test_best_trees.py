"""The tree that gives most at a load: by hand-made step costs, and by what was really decoded with it."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from infra.records.goodput import CostFit, MeasuredGoodput
from models.benchmark.best_trees import SIZES, sizes_at, with_trees
from models.benchmark.contestants import Contestants, SelectedLayers
from models.config.benchmark import BenchmarkConfig
from models.config.eagle3 import Eagle3Config
from models.config.medusa import MedusaConfig
from models.decoding.acceptance import acceptance_length
from models.decoding.goodput import TERMS, FittedCosts, goodput_table
from models.decoding.speculative import speculate_together
from models.drafts.registry import build_draft
from models.drafts.sampling import GREEDY
from models.drafts.trees import DynamicTree
from models.drafts.vocabulary import DraftVocabulary
from models.targets.model import TargetModel

VOCABULARY, NEW, NEVER = 20, 20, frozenset[int]()
CONFIG = BenchmarkConfig(max_lookahead=3, max_new_tokens=NEW, loads=(1, 8), tree_topk=(2, 3))
SHAPE = {"vocab_size": VOCABULARY, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "intermediate_size": 32}


def costs(**amounts: float) -> CostFit:
    return CostFit(**(dict.fromkeys(TERMS, 0.0) | {"knee": 0.0} | amounts))


def measured(target: CostFit, draft: CostFit) -> MeasuredGoodput:
    return MeasuredGoodput(
        main_load=1, draft=goodput_table(FittedCosts(target, draft), (0.5, 0.4, 0.3), CONFIG.loads), champion=None,
        target_times=(), draft_times=(), hardware="none",
    )  # fmt: skip


@pytest.fixture(scope="module")
def loaded() -> Contestants:
    """A random target whose text varies, and an untrained draft with its head."""
    torch.manual_seed(3)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, tie_word_embeddings=False,
        )
    )  # fmt: skip
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0.0, 2.5 * parameter.shape[-1] ** -0.5)
    target = TargetModel(model, [0, 1])
    vocabulary = DraftVocabulary(torch.arange(VOCABULARY), VOCABULARY)
    draft = build_draft(Eagle3Config(**SHAPE), torch.randn(VOCABULARY, 32), vocabulary, (0, 1))
    with torch.no_grad():
        draft.start_from(target.head_weight)
    return Contestants(target, lambda: target, [draft], frozenset(), GREEDY)


@pytest.fixture(scope="module")
def decoded(loaded) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and the target's own texts."""
    prompts = [torch.randint(VOCABULARY, (1 + 2 * at,)).tolist() for at in range(5)]
    return prompts, [
        list(each.tokens) for each in speculate_together(loaded.target, loaded.draft, prompts, 0, NEW, NEVER)
    ]


def test_the_best_tree_is_the_best_of_all_that_decode(loaded, decoded):
    """Verified tokens cost where many texts are: few texts get large trees, and many small ones."""
    found = measured(costs(constant=1.0, knee=16.0, per_token_beyond=0.08), costs(per_position=0.02))
    one, eight = with_trees(found, loaded, CONFIG, *decoded).trees
    fitted = FittedCosts(found.draft.target, found.draft.draft)
    for tree in (one, eight):
        rates = {}
        for topk in CONFIG.tree_topk:
            for depth in (2, 3):
                for tokens in sizes_at(tree.batch, CONFIG):
                    if depth <= tokens <= topk + (depth - 1) * topk**2:
                        shape = DynamicTree(depth, topk, tokens)
                        real = speculate_together(loaded.target, loaded.draft, decoded[0], shape, NEW, NEVER)
                        length = acceptance_length([each.counts for each in real])
                        seconds = fitted.tree_seconds(tree.batch, depth, topk, tokens)
                        rates[depth, topk, tokens] = (tree.batch * length / seconds, length)
        best = max(rate for rate, _ in rates.values())
        assert rates[tree.depth, tree.topk, tree.tokens] == pytest.approx((best, tree.tokens_per_step))
        assert tree.tokens_per_s == pytest.approx(best)
        assert tree.without == found.draft.best_at(tree.batch).tokens_per_s
    assert one.tokens > eight.tokens


def test_draft_costs_are_those_of_its_rows():
    fitted = FittedCosts(costs(per_token=1.0), costs(constant=5.0, per_token=0.5, per_position=2.0))
    # Verified: 4 texts x 8 tokens. Drafted: 4 rows once, then 12 rows for 2 depths.
    assert fitted.tree_seconds(4, 3, 3, 7) == pytest.approx(32 + (5 + 2 + 0.5 * 4) + 2 * (2 + 0.5 * 12))
    assert fitted.tree_seconds(4, 3, 1, 3) == pytest.approx(fitted.seconds(4, 3))


def test_sizes_stay_within_what_is_measured():
    assert sizes_at(1, CONFIG) == list(SIZES)
    assert sizes_at(8, CONFIG) == [3]
    assert sizes_at(16, BenchmarkConfig()) == [3, 5, 7]


def test_a_draft_reads_its_own_layers(loaded, decoded):
    """A draft that reads other layers than its rival finds the same trees."""
    found = measured(costs(constant=1.0), costs(per_position=0.02))
    target = TargetModel(loaded.target.model, [0, 1, 2])
    both = replace(loaded, target=target, drafts=[SelectedLayers(loaded.draft, [0, 1], 3)])
    assert with_trees(found, both, CONFIG, *decoded) == with_trees(found, loaded, CONFIG, *decoded)


def test_there_are_none_where_no_engine_serves_them(loaded, decoded):
    found = measured(costs(constant=1.0), costs())
    config = MedusaConfig(heads=2, vocab_size=VOCABULARY)
    vocabulary = DraftVocabulary(torch.arange(VOCABULARY), VOCABULARY)
    other = replace(loaded, drafts=[build_draft(config, torch.randn(VOCABULARY, 32), vocabulary, (0, 1))])
    assert with_trees(found, other, CONFIG, *decoded) == found
    assert with_trees(found, loaded, CONFIG.model_copy(update={"tree_topk": ()}), *decoded) == found
