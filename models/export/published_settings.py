"""What the `config.json` of a published draft says: every setting is read, known to change nothing, or refused by name.

Layouts: that of `speculators` (0.9.0), and those of EAGLE's and DFlash's authors, SpecForge and ModelOpt, which SGLang
and vLLM read. A setting that is passed over would give a draft that loads wherever sizes agree, and knows nothing.
"""

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from infra.refusal import Refusal
from models.config.rope import OF_TYPE, RopeScaling
from models.export.published_blocks import of_blocks
from models.export.published_section import Section, Settings

ARCHITECTURES = {
    "LlamaForCausalLMEagle3": "eagle3",
    "Eagle3LlamaForCausalLM": "eagle3",
    "LlamaForCausalLMEagle": "eagle3",
    "Qwen3ForCausalLMEagle3": "eagle3",
    "Eagle3Qwen3ForCausalLM": "eagle3",
    "Eagle3DeepseekV2ForCausalLM": "eagle3",
    "Eagle3DeepseekV3ForCausalLM": "eagle3",
    "DFlashDraftModel": "dflash",
    "DominoDraftModel": "domino",
    "DFlash2DraftModel": "dflash2",
    "Qwen3DSparkModel": "dspark",
    "DSparkDraftModel": "dspark",
    "LingDSparkModel": "dspark",
}
"""The authors' names, and the method that each is of."""
METHODS = ("eagle3", "dflash", "dflash2", "dspark")

OF_EXPERTS = (
    "aux_loss_alpha", "ep_size", "first_k_dense_replace", "moe_intermediate_size", "moe_layer_freq", "n_group",
    "n_routed_experts", "n_shared_experts", "norm_topk_prob", "num_experts_per_tok", "num_nextn_predict_layers",
    "routed_scaling_factor", "scoring_func", "seq_aux", "topk_group", "topk_method",
)  # fmt: skip
"""Settings of DeepSeek's experts and MTP layers, copied into MLA drafts, which are dense."""


@dataclass(frozen=True)
class PublishedDraft:
    """What a published draft's `config.json` says."""

    method: str
    shape: dict[str, Any]
    """Fields of the method's configuration that say what the draft is."""
    aux_layer_ids: tuple[int, ...] | None
    """Layer ids in our numbering; None: unspecified, so the engine's default is meant."""
    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    """Size of the target's vocabulary."""
    tied: bool
    """Whether its head is its embeddings."""


def first_error(error: ValidationError) -> str:
    """Setting and reason of the first of the errors, in one line."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    reason = first["msg"].removeprefix("Value error, ")
    return f"{place} is {first['input']!r}: {reason}" if place else reason


def read_published(settings: Settings) -> PublishedDraft:
    """Read the content of a `config.json`. Raises Refusal, with the setting, for what none of our methods is."""
    try:
        return _read(settings)
    except Refusal:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise Refusal(
            f"config.json of the draft is damaged or incomplete ({type(error).__name__}: {error}): correct it, or "
            "fetch the draft again"
        ) from error


def _read(settings: Settings) -> PublishedDraft:
    top = Section(settings)
    speculators = "speculators_model_type" in settings
    layer = top.section("transformer_layer_config") if speculators else top
    method, qk_norm = _method(top, layer, speculators)
    hidden, vocabulary = int(layer.need("hidden_size")), int(layer.need("vocab_size"))
    target_hidden = int(top.take("target_hidden_size", hidden))
    shape = _layers(layer, hidden)
    tied = bool(top.take("tie_word_embeddings", False))
    layer.take("tie_word_embeddings")
    if method == "eagle3":
        shape |= {"qk_norm": qk_norm, "hidden_size": None if hidden == target_hidden else hidden}
        more, layer_ids = _eagle3(top, layer, vocabulary, speculators)
    else:
        more, layer_ids = of_blocks(top, method, vocabulary, shape["sliding_window"], speculators)
    for section in (top, layer):
        section.all_taken()
    # `speculators` numbers layers by their inputs, we and the authors by their outputs.
    aux = None if layer_ids is None else tuple(int(layer_id) - int(speculators) for layer_id in layer_ids)
    return PublishedDraft(method, shape | more, aux, hidden, target_hidden, vocabulary, tied)


def _method(top: Section, layer: Section, speculators: bool) -> tuple[str, bool]:
    """The method, and whether queries and keys are normed."""
    named = list(top.take("architectures", ()))
    if speculators:
        method, family = top.take("speculators_model_type"), layer.take("model_type", "qwen3")
        if method not in METHODS:
            raise Refusal(
                f"its speculators_model_type {method!r} cannot be taken over: give a draft of {', '.join(METHODS)}"
            )
        if family not in ("llama", "qwen3")[method != "eagle3" :]:
            raise Refusal(f"its transformer_layer_config.model_type {family!r} is no layer of {method} drafts here")
        return method, family == "qwen3"
    known = [ARCHITECTURES[name] for name in named if name in ARCHITECTURES]
    # EAGLE's training code names the architecture of the target, and the draft vocabulary.
    if not known and named == ["LlamaForCausalLM"] and "draft_vocab_size" in top.left:
        known = ["eagle3"]
    if not known:
        raise Refusal(
            f"its architectures {sorted(named)} are none that can be taken over: {', '.join(ARCHITECTURES)}, or any in "
            "the speculators layout. Give another draft"
        )
    nested = top.left.get("dflash_config") or {}
    if known[0] == "dflash" and "domino" in (nested.get("projector_type"), top.left.get("projector_type")):
        known = ["domino"]
    return known[0], any("Qwen3" in name for name in named)


def _layers(layer: Section, hidden: int) -> dict[str, Any]:
    """Settings of Llama, Qwen3 or DeepSeek layers, with Hugging Face's defaults."""
    layer.expect(hidden_act="silu", mlp_bias=False, is_neox_style=True, rope_is_neox_style=True)
    heads = int(layer.need("num_attention_heads"))
    return {
        "num_heads": heads,
        **(_latent_heads(layer) if "kv_lora_rank" in layer.left else _grouped_heads(layer, heads, hidden)),
        "intermediate_size": int(layer.need("intermediate_size")),
        "attention_bias": bool(layer.take("attention_bias", False)),
        "rms_norm_eps": float(layer.take("rms_norm_eps", 1e-6)),
        **_windows(layer, int(layer.need("num_hidden_layers"))),
        **_rope(layer),
    }


def _grouped_heads(layer: Section, heads: int, hidden: int) -> dict[str, Any]:
    return {
        "num_kv_heads": int(layer.take("num_key_value_heads", heads)),
        "head_dim": int(layer.take("head_dim", hidden // heads)),
    }


def _latent_heads(layer: Section) -> dict[str, Any]:
    """Settings of DeepSeek's attention; those of grouped queries and of experts mean nothing here."""
    for name in ("num_key_value_heads", "head_dim", "qk_head_dim", *OF_EXPERTS):
        layer.take(name)
    layer.expect(rope_interleave=True)
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return {"mla": {"q_lora_rank": layer.take("q_lora_rank")} | {name: int(layer.need(name)) for name in names}}


def _windows(layer: Section, count: int) -> dict[str, Any]:
    """Engines slide only where `layer_types` says so; a window alone is a copy of the target's setting."""
    types, window = list(layer.take("layer_types", ())), layer.take("sliding_window")
    switched = layer.take("use_sliding_window")
    if types and len(types) != count:
        raise Refusal(f"its layer_types are of {len(types)} layers, its num_hidden_layers is {count}")
    slides = "sliding_attention" in types
    if slides and (window is None or switched is False):
        raise Refusal(
            f"its layer_types slide, its sliding_window is {window!r} and its use_sliding_window {switched!r}: these "
            "contradict each other"
        )
    if switched and not types:
        raise Refusal("its use_sliding_window is True, but no layer_types say which layers slide: add them")
    return {"layer_types": types or ["full_attention"] * count, "sliding_window": window if slides else None}


def _rope(layer: Section) -> dict[str, Any]:
    older, rope = layer.section("rope_scaling"), layer.section("rope_parameters")
    rope = rope if rope.left else older
    theta = rope.take("rope_theta", layer.take("rope_theta", 10_000.0))
    layer.take("rope_theta")
    partial = rope.take("partial_rotary_factor", layer.take("partial_rotary_factor", 1.0))
    layer.take("partial_rotary_factor")
    kind = rope.take("rope_type", rope.take("type", "default"))
    rope.take("type")
    found: dict[str, Any] = {"rope_theta": float(theta), "partial_rotary_factor": float(partial)}
    if kind in OF_TYPE:
        found["rope_scaling"] = _scaling(kind, rope, layer)
    elif kind not in ("default", "mrope"):  # the older name of positions along three axes
        raise Refusal(f"its rope_type is {kind!r}, drafts here have default, {', '.join(OF_TYPE)}: give another draft")
    if (section := rope.take("mrope_section")) is not None:
        found |= {"mrope_section": section, "mrope_interleaved": bool(rope.take("mrope_interleaved", False))}
    rope.all_taken()
    return found


def _scaling(kind: Any, rope: Section, layer: Section) -> RopeScaling:
    given = {name: rope.take(name) for name in ("factor", *OF_TYPE[kind])}
    if "original_max_position_embeddings" in given:
        # Some name it beside the scaling; without it engines take the whole context for the original one.
        beside = layer.take("original_max_position_embeddings", layer.left.get("max_position_embeddings"))
        given["original_max_position_embeddings"] = given["original_max_position_embeddings"] or beside
    rope.expect(extrapolation_factor=1, attn_factor=1, finetuned=True)
    try:
        return RopeScaling(rope_type=kind, **{name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        raise Refusal(f"its scaling of positions is none of those here: {first_error(error)}") from error


def _eagle3(
    top: Section, layer: Section, vocabulary: int, speculators: bool
) -> tuple[dict[str, Any], list[int] | None]:
    """What only EAGLE-3 has, and the layers' ids as the layout counts them."""
    if speculators and top.left.get("norm_before_residual") is None:
        raise Refusal(
            "its norm_before_residual is missing, which vLLM takes for true and speculators for false: add it"
        )
    top.expect(logit_scale=1.0, use_last_layernorm=True, additional_fc=False, parallel_drafting=False)
    size = top.take("draft_vocab_size")
    norms = ("norm_before_residual", "fc_norm", "norm_before_fc", "norm_output")
    shape: dict[str, Any] = {name: bool(top.take(name, False)) for name in norms}
    shape["fc_norm"] |= bool(top.take("use_aux_norm", False))
    # Without a size the head is the target's.
    shape |= {"vocab_size": None if size in (None, vocabulary) else size, "shared_head": size is None}
    shape["fc_bias"] = bool(top.take("bias", False))
    # vLLM looks for it among the layer's settings.
    count = top.take("num_aux_hidden_states", layer.take("num_aux_hidden_states"))
    ids = top.take("eagle_aux_hidden_state_layer_ids")
    if not speculators:
        eagle = top.section("eagle_config")
        eagle.expect(
            use_aux_hidden_state=True, use_input_layernorm_in_first_layer=True, use_last_layernorm=True,
            use_mtp_layernorm=False, next_layer_regular=True, parallel_draft_step=1,
        )  # fmt: skip
        shape["norm_before_fc"] |= bool(eagle.take("norm_before_fc", False))
        # ModelOpt writes an empty list for the engine's default.
        ids = _by_output(eagle.take("eagle_aux_hidden_state_layer_ids") or None, ids)
        eagle.all_taken()
    if count not in (None, 3 if ids is None else len(ids)):
        raise Refusal(f"its num_aux_hidden_states is {count}, its eagle_aux_hidden_state_layer_ids are {ids}")
    return shape, ids


def _by_output(ids: list[int] | None, by_input: list[int] | None) -> list[int] | None:
    """Layers' ids from the authors' place, where they are numbered by outputs, and from vLLM's, by inputs."""
    if by_input is None:
        return ids
    found = [int(layer_id) - 1 for layer_id in by_input]
    if ids not in (None, found):
        raise Refusal(
            f"its eagle_aux_hidden_state_layer_ids {by_input}, which vLLM reads, are not one more than those of its "
            f"eagle_config, {ids}, which SGLang reads"
        )
    return found
