"""EAGLE-3 drafts in the words of engines: SGLang (0.5.23), vLLM (0.33.0) and the package `speculators` (0.9.0)."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from models.drafts.eagle3.module import Eagle3Draft


def sglang_obstacles(draft: "Eagle3Draft") -> list[str]:
    """Settings that SGLang would run differently.

    It puts the target's embeddings in the place of trained ones of their size. Features as wide as an embedding it
    takes for the draft's own output, neither normed nor fused. It has no biases of queries, keys and values, and with
    one of the fusion expects one of the attention's output; no norms of queries and keys; a residual that is not
    normed; and one window for all layers. It reads the settings as Hugging Face's `LlamaConfig`, which refuses heads
    that do not divide the hidden size. With MLA it has one layer, whose queries come from a latent vector, and no norm
    over all features.
    """
    config, same_size = draft.config, draft.hidden_size == draft.target_hidden_size
    width = len(draft.aux_layer_ids) * draft.target_hidden_size
    found = {
        "train_embeddings": config.train_embeddings and same_size,
        "features as wide as its hidden states": width == draft.hidden_size,
        "attention_bias": config.attention_bias,
        "fc_bias": config.fc_bias,
        "qk_norm": config.qk_norm,
        "norm_before_residual": config.norm_before_residual,
        "layer_types of both kinds": len(set(config.windows)) > 1,
        "num_heads that do not divide its hidden size": config.mla is None
        and draft.hidden_size % config.num_heads != 0,
    }
    if config.mla is not None:
        found |= {
            "mla.q_lora_rank of null": config.mla.q_lora_rank is None,
            "several MLA layers": len(config.layer_types) > 1,
            "norm_before_fc and mla": config.norm_before_fc,
        }
    return [name for name, holds in found.items() if holds]


def sglang_config(draft: "Eagle3Draft") -> dict[str, Any] | None:
    """For SGLang's `LlamaForCausalLMEagle3` or, with MLA, `Eagle3DeepseekV2ForCausalLM`, whose name vLLM shares.

    In `eagle_config` layers have SGLang's numbers. vLLM prefers its own, one more, where they are at the top: MLA
    drafts have no other part for it. None for what SGLang's class would run differently.
    """
    config, whole = draft.config, draft.vocabulary.whole
    if sglang_obstacles(draft):
        return None
    architecture, own_numbers = "LlamaForCausalLMEagle3", {}
    if config.mla is not None:
        architecture = "Eagle3DeepseekV2ForCausalLM"
        own_numbers = {"eagle_aux_hidden_state_layer_ids": _by_input(draft)}
    return {
        **_layers(draft),
        **own_numbers,
        "architectures": [architecture],
        "target_hidden_size": draft.target_hidden_size,
        "draft_vocab_size": None if config.shared_head and whole else len(draft.vocabulary),
        **_norms(draft),
        "num_aux_hidden_states": len(draft.aux_layer_ids),
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(draft.aux_layer_ids),
        },
    }


def speculators_config(draft: "Eagle3Draft") -> dict[str, Any] | None:
    """For vLLM and speculators' `Eagle3DraftModel`, which call the output of the target's layer l number l + 1.

    None with the target's whole head for the draft's: SGLang's way to say so contradicts theirs; with a bias of the
    fusion or MLA, which they do not have; and with heads that `LlamaConfig` refuses.
    """
    config = draft.config
    uneven = not config.qk_norm and draft.hidden_size % config.num_heads
    if uneven or config.fc_bias or config.mla or (config.shared_head and draft.vocabulary.whole):
        return None
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        # vLLM looks for the number of features among the layer's settings, and assumes three.
        "transformer_layer_config": _layers(draft) | {"num_aux_hidden_states": len(draft.aux_layer_ids)},
        "draft_vocab_size": len(draft.vocabulary),
        "target_hidden_size": draft.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": _by_input(draft),
        "norm_before_residual": config.norm_before_residual,
        **_norms(draft),
        "embed_requires_grad": draft.has_own_embeddings,
    }


def _by_input(draft: "Eagle3Draft") -> list[int]:
    """The layers that it reads, by the numbers of the layers that come after them."""
    return [layer_id + 1 for layer_id in draft.aux_layer_ids]


def _norms(draft: "Eagle3Draft") -> dict[str, bool]:
    return {name: getattr(draft.config, name) for name in ("fc_norm", "norm_before_fc", "norm_output")}


def _layers(draft: "Eagle3Draft") -> dict[str, Any]:
    """Hugging Face's `LlamaConfig`; `Qwen3Config` with normed queries and keys; `DeepseekV3Config` with MLA."""
    config = draft.config
    layers = config.engine_layers(draft.hidden_size, draft.vocabulary.target_size)
    if config.mla is not None:
        # By its own name, deepseek_v3, vLLM takes a draft for the target's MTP layer.
        return {"model_type": "kimi_k2", **layers}
    family = {"model_type": "qwen3"} if config.qk_norm else {"model_type": "llama", "mlp_bias": False}
    if config.sliding_window is None:
        return family | layers
    # Without the switch Hugging Face's Qwen3Config forgets the window.
    window = {"use_sliding_window": True, "sliding_window": config.sliding_window}
    return family | layers | window | {"layer_types": list(config.layer_types)}
