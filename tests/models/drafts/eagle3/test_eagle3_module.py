"""What is EAGLE-3's alone: SGLang's names and sizes, and options that make no sense together."""

import re

import pytest
import torch
from pydantic import ValidationError

from models.config.eagle3 import Eagle3Config
from models.drafts.base import PackedSamples, TargetProjection
from models.drafts.eagle3 import unrolled
from models.drafts.eagle3.module import Eagle3Draft
from models.drafts.vocabulary import DraftVocabulary

HIDDEN, TARGET_VOCABULARY = 12, 40
SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 20, "ttt_steps": 3}
LAYER = {
    "fc.weight": (HIDDEN, 3 * HIDDEN),
    "layers.0.input_layernorm.weight": (HIDDEN,),
    "layers.0.hidden_norm.weight": (HIDDEN,),
    "layers.0.post_attention_layernorm.weight": (HIDDEN,),
    "layers.0.self_attn.q_proj.weight": (32, 2 * HIDDEN),
    "layers.0.self_attn.k_proj.weight": (16, 2 * HIDDEN),
    "layers.0.self_attn.v_proj.weight": (16, 2 * HIDDEN),
    "layers.0.self_attn.o_proj.weight": (HIDDEN, 32),
    "layers.0.mlp.gate_proj.weight": (20, HIDDEN),
    "layers.0.mlp.up_proj.weight": (20, HIDDEN),
    "layers.0.mlp.down_proj.weight": (HIDDEN, 20),
    "norm.weight": (HIDDEN,),
}


def make(layers: tuple[int, ...] = (0, 1, 3), **changes) -> Eagle3Draft:
    config = Eagle3Config.model_validate(SIZES | {"vocab_size": 24} | changes)
    size = config.vocabulary_size(TARGET_VOCABULARY)
    vocabulary = DraftVocabulary(torch.arange(TARGET_VOCABULARY - size, TARGET_VOCABULARY), TARGET_VOCABULARY)
    return Eagle3Draft(config, torch.randn(TARGET_VOCABULARY, HIDDEN), vocabulary, layers)


@pytest.mark.parametrize(
    ("changes", "stored", "said"),
    [
        ({}, {"lm_head.weight": (24, HIDDEN)}, {"draft_vocab_size": 24, "fc_norm": False, "norm_output": False}),
        (
            {"fc_norm": True, "norm_output": True},
            {f"fc_norm.{i}.weight": (HIDDEN,) for i in range(3)} | {"lm_head.weight": (24, HIDDEN)},
            {"fc_norm": True, "norm_before_fc": False, "norm_output": True},
        ),
        (
            {"norm_before_fc": True},
            {"input_norm.weight": (3 * HIDDEN,), "lm_head.weight": (24, HIDDEN)},
            {"fc_norm": False, "norm_before_fc": True},
        ),
        ({"vocab_size": None}, {"lm_head.weight": (40, HIDDEN)}, {"draft_vocab_size": 40, "vocab_size": 40}),
        ({"shared_head": True}, {"lm_head.weight": (24, HIDDEN)}, {"draft_vocab_size": 24}),
        # SGLang takes the target's head where the draft vocabulary has no size.
        ({"shared_head": True, "vocab_size": None}, {}, {"draft_vocab_size": None}),
    ],
)
def test_names_sizes_and_settings_are_those_that_sglang_reads(changes, stored, said):
    draft = make(**changes)
    assert {name: tuple(tensor.shape) for name, tensor in draft.state_dict().items()} == LAYER | stored
    config = draft.engine_config()
    assert config is not None
    assert said.items() <= config.items()
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 3]
    assert config["num_aux_hidden_states"] == 3


SLIDING = {"sliding_window": 5, "layer_types": ["sliding_attention"]}


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({"train_embeddings": True}, (0, 1, 3)),
        ({}, (1,)),
        ({"hidden_size": 3 * HIDDEN}, (0, 1, 3)),
        ({"attention_bias": True}, (0, 1, 3)),
        ({"qk_norm": True}, (0, 1, 3)),
        ({"fc_bias": True}, (0, 1, 3)),
        ({"norm_before_residual": True}, (0, 1, 3)),
        ({"num_heads": 5, "num_kv_heads": 1}, (0, 1, 3)),
        ({"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}, (0, 1, 3)),
    ],
)
def test_what_sglang_would_run_differently_has_no_engine_config(changes, layers):
    draft = make(layers, **changes)
    assert draft.engine_config() is None
    (obstacle,) = draft.engine_obstacles()
    assert obstacle.startswith("features as wide") or obstacle.split()[0] in changes


def test_sglang_is_told_the_window_of_a_draft_that_slides():
    draft = make(**SLIDING)
    assert draft.engine_config() is not None
    assert draft.config.engine_arguments(2)[-2:] == ["--speculative-draft-window-size", "4"]
    assert "--speculative-draft-window-size" not in make().config.engine_arguments(2)


def test_a_draft_of_its_own_size_starts_from_columns_of_the_targets_tables():
    embedding, head = torch.randn(TARGET_VOCABULARY, HIDDEN), torch.randn(TARGET_VOCABULARY, HIDDEN)
    vocabulary = DraftVocabulary(torch.arange(3, 27), TARGET_VOCABULARY)
    for size in (8, 20):
        config = Eagle3Config.model_validate(SIZES | {"vocab_size": 24, "hidden_size": size})
        draft = Eagle3Draft(config, embedding, vocabulary, (0, 1))
        draft.start_from(head)
        columns = min(size, HIDDEN)
        for table, source in ((draft.embed_tokens.weight, embedding), (draft.lm_head.weight, head[3:27])):
            assert isinstance(table, torch.nn.Parameter)
            assert table.shape == (len(source), size)
            assert torch.equal(table[:, :columns], source[:, :columns])
            assert not table[:, columns:].any()
        assert draft.engine_config() is not None
        assert "embed_tokens.weight" in draft.state_dict()


def test_trained_embeddings_start_as_the_targets_and_a_shared_head_stays_it():
    head = torch.randn(TARGET_VOCABULARY, HIDDEN)
    embedding = torch.randn(TARGET_VOCABULARY, HIDDEN)
    config = Eagle3Config.model_validate(SIZES | {"vocab_size": 24, "train_embeddings": True, "shared_head": True})
    vocabulary = DraftVocabulary(torch.arange(3, 27), TARGET_VOCABULARY)
    draft = Eagle3Draft(config, embedding, vocabulary, (0, 1))
    draft.start_from(head)
    trained = dict(draft.named_parameters())
    assert torch.equal(trained["embed_tokens.weight"], embedding)
    assert trained["embed_tokens.weight"].data_ptr() != embedding.data_ptr()
    assert "lm_head.weight" not in trained
    assert torch.equal(draft.lm_head.weight, head[3:27])
    frozen = make()
    assert "embed_tokens.weight" not in {*frozen.state_dict(), *dict(frozen.named_parameters())}


def test_a_whole_shared_head_takes_no_memory_of_its_own():
    draft, head = make(shared_head=True, vocab_size=None), torch.randn(TARGET_VOCABULARY, HIDDEN)
    draft.start_from(head)
    assert draft.lm_head.weight.data_ptr() == head.data_ptr()


def test_step_weights_are_given_or_decay():
    assert make(ttt_decay=0.5).config.step_weights == (1, 0.5, 0.25)
    assert make(ttt_weights=[1, 0, 0.5]).config.step_weights == (1, 0, 0.5)


LATENT = {"qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ttt_weights": [1, 2]}, "give one weight for each of the 3 ttt_steps"),
        ({"ttt_weights": [0, 0, 0]}, "not all of them 0"),
        ({"ttt_weights": [1, -1, 1]}, "greater than or equal to 0"),
        ({"fc_norm": True, "norm_before_fc": True}, "set one of them"),
        ({"num_kv_heads": 3}, "no multiple of num_kv_heads 3"),
        ({"hidden_size": 16, "shared_head": True}, "leave hidden_size out"),
        ({"layer_types": ["sliding_attention"]}, "set draft.sliding_window"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 3}, "must exceed ttt_steps 3"),
        ({"partial_rotary_factor": 0.4}, "is 3: pairs are rotated"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4}},
            "rope_type yarn needs it",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4, "beta_fast": 2}}, "linear has no such setting"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4}}, "'linear', 'llama3' or 'yarn'"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 0.5}}, "must not be below low_freq_factor"),
        ({"rope_scaling": LLAMA3 | {"rope_type": "yarn", "mscale": 1}}, "set both, or neither"),
        ({"mla": {}}, "num_kv_heads 2 and head_dim 8 are 4 and 192 with draft.mla: leave them out"),
        ({"mla": LATENT | {"v_head_dim": 9}, "num_kv_heads": 4}, "v_head_dim 9 exceeds"),
        ({"mla": LATENT | {"qk_rope_head_dim": 3}}, "multiple of 2"),
        ({"mla": LATENT, "num_kv_heads": 4, "qk_norm": True, "attention_bias": True}, "no attention_bias, qk_norm"),
        (
            {"mla": LATENT, "num_kv_heads": 4, "layer_types": ["sliding_attention"], "sliding_window": 9},
            "draft.mla has no sliding_attention layers",
        ),
        ({"mla": LATENT, "num_kv_heads": 4, "rope_scaling": LLAMA3}, "engines take every scaling of an MLA layer"),
    ],
)
def test_options_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ValidationError, match=re.escape(message)):
        Eagle3Config.model_validate(SIZES | changes)


TWO_LAYERS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "qk_norm": True}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "changes",
    [
        {"norm_output": True},
        {"attention_bias": True, "fc_bias": True} | TWO_LAYERS,
        {"mla": LATENT | {"q_lora_rank": 6, "kv_lora_rank": 5}, "num_kv_heads": 4},
    ],
)
def test_computing_the_layer_again_changes_no_gradient(monkeypatch, precision, changes):
    monkeypatch.setattr(unrolled, "RECOMPUTED_ROWS", 5)
    g, lengths = torch.Generator().manual_seed(0), (7, 9)
    batch = PackedSamples(
        tokens=torch.randint(TARGET_VOCABULARY, (16,), generator=g),
        loss_mask=torch.ones(16, dtype=torch.bool),
        aux=torch.randn(16, 3 * HIDDEN, generator=g),
        last=torch.randn(16, HIDDEN, generator=g),
        lengths=lengths,
    )
    torch.manual_seed(1)
    draft = make(**changes)
    target = TargetProjection(torch.randn(24, HIDDEN, generator=g), None, 1.0, None)
    found = []
    for draft.recompute in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
            loss = draft.loss(batch, target, 10, 4).loss
        found.append(torch.autograd.grad(loss, list(draft.parameters())))
    for kept, again in zip(*found, strict=True):
        assert kept.any()
        assert torch.allclose(
            kept, again, rtol=1e-4 if precision == "float32" else 0.05, atol=1e-6 if precision == "float32" else 1e-3
        )
