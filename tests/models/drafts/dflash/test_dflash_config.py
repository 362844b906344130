"""What DFlash refuses, and what it says then."""

import pytest
import torch

from models.config.dflash import DFlashConfig
from models.config.recipe import load_recipe
from models.drafts.dflash.module import DFlashDraft
from models.drafts.vocabulary import DraftVocabulary

SHAPE = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 16}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ("sliding_attention",)}, "sliding_window"),
        ({"sliding_sees_ahead": True}, "there are none: leave it out"),
        (
            {"layer_types": ("sliding_attention",), "sliding_window": 9, "sliding_sees_ahead": True},
            "sliding_window 9 is less than block_size 16",
        ),
        ({"num_heads": 3}, "multiple"),
        ({"mask_token_id": 40}, "0 to 39"),
        ({"vocab_sizes": 16}, "Extra inputs"),
    ],
)
def test_refusals(changes, message):
    every = DraftVocabulary(torch.arange(40), 40)
    with pytest.raises(ValueError, match=message):
        DFlashDraft(DFlashConfig.model_validate(SHAPE | changes), torch.zeros(40, 12), every, (0,))


def test_sglang_would_propose_tokens_outside_a_draft_vocabulary():
    draft = DFlashDraft(
        DFlashConfig(**SHAPE, vocab_size=20), torch.zeros(40, 12), DraftVocabulary(torch.arange(20), 40), (0,)
    )
    assert draft.engine_config() is None


def test_a_recipe_names_it(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "name: one\ntarget: {source: tiny, name: t, aux_layer_ids: [0, 1]}\n"
        "draft: {method: dflash, num_heads: 4, num_kv_heads: 2, head_dim: 8, intermediate_size: 16}\n"
    )
    config = load_recipe(recipe, ["draft.block_size=8"])
    assert config.draft == DFlashConfig(**SHAPE, block_size=8)
    assert type(config).model_validate_json(config.model_dump_json()) == config
