"""Which of a draft's weights Muon steps, and which AdamW."""

from typing import Any

import pytest
import torch

from models.config.draft import parse_draft_config
from models.config.training import TrainingConfig
from models.drafts.base import Draft
from models.drafts.registry import build_draft
from models.drafts.vocabulary import DraftVocabulary
from models.training.optimizer import make_optimizer

HIDDEN, TOKENS, KNOWN = 16, 97, 61
SHAPE = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "intermediate_size": 32}
BLOCK = SHAPE | {"layer_types": ["full_attention"], "block_size": 4}
TABLES: list[tuple[dict[str, Any], set[str]]] = [
    (SHAPE | {"method": "eagle3", "train_embeddings": True}, {"lm_head.weight", "embed_tokens.weight"}),
    (BLOCK | {"method": "dflash"}, set()),
    (
        BLOCK | {"method": "dflash2", "selector_rank": 4},
        {"candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"},
    ),
    (BLOCK | {"method": "dspark", "markov_rank": 4}, {f"markov_head.markov_w{one}.weight" for one in (1, 2)}),
    (BLOCK | {"method": "domino", "gru_hidden_dim": 8, "emb_dim": 4}, {"embed_proj.2.weight"}),
    ({"method": "medusa"}, {"lm_head.weight"}),
    (SHAPE | {"method": "mtp", "family": "mimo"}, set()),
]


def draft_of(settings: dict[str, Any], known: int) -> Draft:
    """With an embedding of `TOKENS` rows, and `known` of the tokens where the method can leave some out."""
    sized = settings | ({"vocab_size": known} if settings["method"] in ("eagle3", "dspark", "medusa") else {})
    config = parse_draft_config(sized)
    vocabulary = DraftVocabulary(torch.arange(config.vocabulary_size(TOKENS)), TOKENS)
    layers = () if config.method == "mtp" else (0, 1, 2)
    return build_draft(config, torch.randn(TOKENS, HIDDEN), vocabulary, layers)


def stepped_by_adamw(draft: Draft) -> set[str]:
    """Names of its weights of several rows and columns."""
    optimizer, _ = make_optimizer(draft, TrainingConfig(optimizer="muon"), torch.float32)
    others = {id(weight) for weight in optimizer.param_groups[1]["params"]}
    return {
        name
        for name, weight in draft.named_parameters()
        if weight.ndim > 1 and len(weight) > 1 and id(weight) in others
    }


@pytest.mark.parametrize(("settings", "tables"), TABLES, ids=[settings["method"] for settings, _ in TABLES])
def test_muon_steps_everything_but_tables_of_tokens(settings, tables):
    assert stepped_by_adamw(draft_of(settings, KNOWN)) == tables


@pytest.mark.parametrize("known", [HIDDEN, 32])
def test_a_layer_with_as_many_rows_as_the_vocabulary_is_no_table(known):
    settings, tables = TABLES[0]
    assert stepped_by_adamw(draft_of(settings, known)) == tables
