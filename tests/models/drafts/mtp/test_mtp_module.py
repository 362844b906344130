"""What only MTP has: names in checkpoints, FastMTP's objective, targets that it refuses."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

from infra.refusal import Refusal
from models.config.experts import Experts
from models.config.mtp import MtpConfig, own_layer
from models.drafts.base import PackedSamples, TargetProjection
from models.drafts.eagle3 import unrolled
from models.drafts.mtp.experts import MixtureOfExperts
from models.drafts.mtp.module import MtpDraft
from models.drafts.vocabulary import DraftVocabulary

HIDDEN, VOCABULARY, PASSES = 24, 40, 3
SIZES = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 20, "ttt_steps": PASSES}


def make_draft(**changes) -> MtpDraft:
    torch.manual_seed(5)
    every = DraftVocabulary(torch.arange(VOCABULARY), VOCABULARY)
    config = MtpConfig.model_validate(SIZES | {"family": "mimo", "attention_bias": True} | changes)
    draft = MtpDraft(config, torch.randn(VOCABULARY, HIDDEN), every, ())
    for name, parameter in draft.named_parameters():
        torch.nn.init.normal_(parameter, float("norm" in name), 0.2)
    draft.start_from(torch.randn(VOCABULARY, HIDDEN))
    return draft


def make_batch(lengths: tuple[int, ...]) -> PackedSamples:
    g, count = torch.Generator().manual_seed(1), sum(lengths)
    last = torch.randn(count, HIDDEN, generator=g)
    tokens, mask = torch.randint(VOCABULARY, (count,), generator=g), torch.rand(count, generator=g) < 0.7
    return PackedSamples(tokens, mask, last, last, lengths)


def passes(draft: MtpDraft, tokens: Tensor, last: Tensor) -> list[Tensor]:
    """`[T, V]` logits of FastMTP's recursive passes over one text, by transformers' own Qwen2 layer."""
    shape = {"hidden_size": HIDDEN, "intermediate_size": 20, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(**shape, head_dim=8, num_hidden_layers=1, rms_norm_eps=1e-6, attn_implementation="eager")
    layer, count = Qwen2DecoderLayer(config, 0), len(tokens)
    layer.load_state_dict(draft.layers[0].state_dict())
    mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
    tables = Qwen2RotaryEmbedding(config)(last[None], torch.arange(count)[None])
    found, hidden = [], last
    for step in range(PASSES):
        embedded = draft.embed_tokens.weight[tokens.roll(-1 - step)]  # what comes round is after the text's end
        embedded = embedded * (torch.arange(count) > 0).unsqueeze(1)
        entered = draft.fc(torch.cat([draft.hidden_norm(hidden), draft.embedding_norm(embedded)], dim=-1))
        out = layer(entered[None], attention_mask=mask, position_embeddings=tables)
        hidden = draft.norm((out[0] if isinstance(out, tuple) else out).view(count, HIDDEN))
        found.append(hidden @ draft.lm_head.weight.T)
    return found


def test_fastmtps_objective_is_cross_entropy_over_recursive_passes():
    draft, batch = make_draft(objective="fastmtp"), make_batch((13, 9))
    target = TargetProjection(torch.randn(VOCABULARY, HIDDEN), None, 1.0, None)
    found = draft.loss(batch, target, 7, 4)
    expected, powers = torch.zeros(()), [0.6**step for step in range(PASSES)]
    parts = zip(*(x.split(batch.lengths) for x in (batch.tokens, batch.loss_mask, batch.last)), strict=True)
    for tokens, mask, last in parts:
        for step, logits in enumerate(passes(draft, tokens, last)):
            for row in range(len(tokens) - 2 - step):
                if mask[row + 2 + step]:
                    loss = cross_entropy(logits[row], tokens[row + 2 + step])
                    expected = expected + powers[step] / sum(powers) * loss / 7
    assert found.loss.item() == pytest.approx(expected.item(), rel=1e-4)
    trained = list(draft.parameters())
    pairs = zip(torch.autograd.grad(found.loss, trained, retain_graph=True), trained, strict=True)
    assert all(gradient.abs().sum() > 0 for gradient, _ in pairs)


def test_the_first_pass_is_the_first_step_of_a_chain():
    """Only later passes differ from what decoding computes."""
    target, batch = TargetProjection(torch.randn(VOCABULARY, HIDDEN), None, 1.0, None), make_batch((13, 9))
    only_first = {"ttt_weights": [1.0, 0.0, 0.0], "loss": "kl"}
    one, other = (make_draft(objective=name, **only_first) for name in ("fastmtp", "training_time_test"))
    first, second = (draft.loss(batch, target, 7, 64) for draft in (one, other))
    assert first.accepted[0] == second.accepted[0]
    assert first.tried[0] == second.tried[0] > 0


NAMES = {
    "mimo": ("model.mtp_layers.0.input_proj.weight", "model.mtp_layers.0.self_attn.q_proj.bias"),
    "qwen": ("mtp.fc.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.layers.0.self_attn.q_proj.weight"),
    "deepseek": ("model.layers.4.eh_proj.weight", "model.layers.4.shared_head.norm.weight"),
}


@pytest.mark.parametrize("family", NAMES)
def test_parameters_have_the_names_of_their_familys_checkpoints(family):
    draft = make_draft(family=family, layer_index=4, attention_bias=family == "mimo")
    assert set(NAMES[family]) <= draft.target_tensors().keys()
    assert len(draft.target_tensors()) == len(list(draft.parameters()))


TEXT = {"num_hidden_layers": 4}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
REFUSED = [
    ({"model_type": "llama"}, "no MTP layer of model type 'llama'"),
    ({"model_type": "deepseek_v3"} | ROUTED | {"scoring_func": "softmax", "topk_method": "greedy"}, "softmax, greedy"),
    ({"model_type": "mimo", "num_nextn_predict_layers": 3}, "has 3 MTP layers"),
    ({"model_type": "deepseek_v3", "num_nextn_predict_layers": 0}, "has no MTP layers"),
]


@pytest.mark.parametrize(("text", "why"), REFUSED)
def test_layers_of_other_kinds_are_refused(text, why):
    with pytest.raises(Refusal, match=why):
        own_layer(TEXT | text)


def test_what_a_target_says_of_its_layer():
    assert own_layer(TEXT | {"model_type": "mimo"}) == {
        "family": "mimo", "layer_index": 0, "attention_bias": True, "qk_norm": False, "gated_attention": False,
        "partial_rotary_factor": 1.0,
    }  # fmt: skip
    rope = {"rope_parameters": {"partial_rotary_factor": 0.25}}
    found = own_layer(TEXT | {"model_type": "qwen3_5_text", "attention_bias": False} | rope)
    assert (found["family"], found["gated_attention"], found["partial_rotary_factor"]) == ("qwen", True, 0.25)


def test_what_a_target_says_of_its_experts_and_its_latent_attention():
    sizes = {"q_lora_rank": None, "kv_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 6, "v_head_dim": 7}
    text = TEXT | ROUTED | sizes | {"model_type": "deepseek_v3", "num_attention_heads": 3, "n_shared_experts": 2}
    found = own_layer(text | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5})
    assert (found["mla"], found["num_kv_heads"], found["head_dim"]) == (sizes, 3, 10)
    assert found["experts"] == {
        "count": 8, "per_token": 2, "intermediate_size": 32, "normed": True, "scoring": "sigmoid", "shared_size": 64,
        "groups": 4, "groups_per_token": 2, "scaling": 2.5,
    }  # fmt: skip


EXPERTS = {"count": 6, "per_token": 2, "intermediate_size": 8, "scoring": "softmax"}


@pytest.mark.parametrize(("changes", "why"), [
    ({"groups": 4}, "cannot be chosen"), ({"groups": 2, "groups_per_token": 3}, "cannot be chosen"),
    ({"per_token": 7}, "cannot be chosen"), ({"groups": 3, "per_token": 3}, "cannot be chosen"),
    ({"groups": 6, "per_token": 1}, "two or more"),
])  # fmt: skip
def test_routing_that_cannot_be(changes, why):
    with pytest.raises(ValueError, match=why):
        Experts.model_validate(EXPERTS | changes)


def test_rows_read_their_experts_whatever_the_others_read():
    """Sorted by expert or alone, a row gives the same; experts that no row chose get no gradient."""
    torch.manual_seed(2)
    mixture = MixtureOfExperts(Experts.model_validate(EXPERTS | {"shared_size": 4}), HIDDEN)
    for parameter in mixture.parameters():
        torch.nn.init.normal_(parameter, 0, 0.3)
    x = torch.randn(5, HIDDEN)
    together = mixture.weights().add_to(torch.zeros_like(x), x)
    alone = torch.cat([mixture.weights().add_to(torch.zeros(1, HIDDEN), row[None]) for row in x])
    assert torch.allclose(together, alone, atol=1e-6)
    mixture.weights().add_to(torch.zeros(1, HIDDEN), x[:1]).sum().backward()
    chosen, _ = mixture.gate(x[:1])
    got = mixture.experts.down_proj.grad
    assert got is not None
    assert set(got.abs().sum((1, 2)).nonzero().flatten().tolist()) == set(chosen[0].tolist())


@pytest.mark.parametrize("objective", ["training_time_test", "fastmtp"])
def test_computing_the_layer_again_changes_no_gradient(monkeypatch, objective):
    monkeypatch.setattr(unrolled, "RECOMPUTED_ROWS", 5)
    qwen = {"family": "qwen", "attention_bias": False, "qk_norm": True, "gated_attention": True}
    target, batch = TargetProjection(torch.randn(VOCABULARY, HIDDEN), None, 1.0, None), make_batch((7, 9))
    draft, found = make_draft(objective=objective, **qwen), []
    for draft.recompute in (False, True):
        found.append(torch.autograd.grad(draft.loss(batch, target, 10, 4).loss, list(draft.parameters())))
    for kept, again in zip(*found, strict=True):
        assert kept.any()
        assert torch.allclose(kept, again, rtol=1e-4, atol=1e-6)
