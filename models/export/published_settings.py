"""What the `config.json` of a published draft says: every setting is read, known to change nothing, or refused by name.

Layouts: that of `speculators` (0.9.0), and those of EAGLE's and DFlash's authors, SpecForge and ModelOpt, which SGLang
and vLLM read. A setting that is passed over would give a draft that loads wherever sizes agree, and knows nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from infra.refusal import Refusal
from models.config.rope import OF_TYPE, RopeScaling

Settings = Mapping[str, Any]

ARCHITECTURES = {
    "LlamaForCausalLMEagle3": "eagle3",
    "Eagle3LlamaForCausalLM": "eagle3",
    "LlamaForCausalLMEagle": "eagle3",
    "Qwen3ForCausalLMEagle3": "eagle3",
    "Eagle3Qwen3ForCausalLM": "eagle3",
    "Eagle3DeepseekV2ForCausalLM": "eagle3",
    "Eagle3DeepseekV3ForCausalLM": "eagle3",
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash2",
    "Qwen3DSparkModel": "dspark",
    "DSparkDraftModel": "dspark",
    "LingDSparkModel": "dspark",
}
"""The authors' names, and the method that each is of."""
METHODS = ("eagle3", "dflash", "dflash2", "dspark")

DFLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
"""Settings of DFlash 2, which DFlash does not have."""

PASSED_OVER = frozenset(
    name
    for line in (
        # Who wrote the file and for whom.
        "_name_or_path auto_map transformers_version model_type target_model_type speculators_version verifier",
        "speculators_config has_no_defaults_at_init num_target_layers",
        # Precision, cache, training; the weights are there.
        "dtype torch_dtype use_cache use_bfloat16 torchscript initializer_range attention_dropout hidden_dropout",
        "pretraining_tp embed_requires_grad reuse_target_lm_head max_window_layers max_position_embeddings",
        # Tokens and texts.
        "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id tokenizer_class prefix",
        # What older versions of transformers wrote into every configuration.
        "add_cross_attention architectures bad_words_ids begin_suppress_tokens chunk_size_feed_forward",
        "cross_attention_hidden_size diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size",
        "exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id id2label is_decoder",
        "is_encoder_decoder label2id length_penalty max_length min_length no_repeat_ngram_size num_beam_groups",
        "num_beams num_return_sequences output_attentions output_hidden_states output_scores problem_type pruned_heads",
        "remove_invalid_values repetition_penalty return_dict return_dict_in_generate suppress_tokens",
        "task_specific_params temperature tf_legacy_loss tie_encoder_decoder top_k top_p typical_p",
    )
    for name in line.split()
)
"""Settings that change nothing of what a draft proposes."""
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


class _Section:
    """A part of the file, of which every setting has to be taken."""

    def __init__(self, settings: Settings, place: str = ""):
        self.left, self.place = dict(settings), place

    def take(self, name: str, default: Any = None) -> Any:
        """The setting, or the default where it is missing or null."""
        value = self.left.pop(name, None)
        return default if value is None else value

    def need(self, name: str) -> Any:
        """The setting. Raises KeyError where it is missing or null."""
        if self.left.get(name) is None:
            raise KeyError(name)
        return self.left.pop(name)

    def section(self, name: str) -> "_Section":
        return _Section(self.take(name, {}), f"{self.place}{name}.")

    def expect(self, **values: Any) -> None:
        """Raise Refusal unless each setting is missing or has this value."""
        for name, value in values.items():
            found = self.take(name, value)
            if found != value:
                raise Refusal(f"its {self.place}{name} is {found!r}, drafts here have {value!r}: give another draft")

    def all_taken(self) -> None:
        """Raise Refusal for a setting that nobody asked for, unless it changes nothing, or is null."""
        for name, value in self.left.items():
            if name not in PASSED_OVER and value not in (None, {}, []):
                raise Refusal(
                    f"its {self.place}{name} is {value!r}, a setting that drafts here do not have: give another draft"
                )


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
    top = _Section(settings)
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
        more, layer_ids = _blocks(top, method, vocabulary, shape["sliding_window"], speculators)
    for section in (top, layer):
        section.all_taken()
    # `speculators` numbers layers by their inputs, we and the authors by their outputs.
    aux = None if layer_ids is None else tuple(int(layer_id) - int(speculators) for layer_id in layer_ids)
    return PublishedDraft(method, shape | more, aux, hidden, target_hidden, vocabulary, tied)


def _method(top: _Section, layer: _Section, speculators: bool) -> tuple[str, bool]:
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
    return known[0], any("Qwen3" in name for name in named)


def _layers(layer: _Section, hidden: int) -> dict[str, Any]:
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


def _grouped_heads(layer: _Section, heads: int, hidden: int) -> dict[str, Any]:
    return {
        "num_kv_heads": int(layer.take("num_key_value_heads", heads)),
        "head_dim": int(layer.take("head_dim", hidden // heads)),
    }


def _latent_heads(layer: _Section) -> dict[str, Any]:
    """Settings of DeepSeek's attention; those of grouped queries and of experts mean nothing here."""
    for name in ("num_key_value_heads", "head_dim", "qk_head_dim", *OF_EXPERTS):
        layer.take(name)
    layer.expect(rope_interleave=True)
    names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return {"mla": {"q_lora_rank": layer.take("q_lora_rank")} | {name: int(layer.need(name)) for name in names}}


def _windows(layer: _Section, count: int) -> dict[str, Any]:
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


def _rope(layer: _Section) -> dict[str, Any]:
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
    elif kind != "default":
        raise Refusal(f"its rope_type is {kind!r}, drafts here have default, {', '.join(OF_TYPE)}: give another draft")
    rope.all_taken()
    return found


def _scaling(kind: Any, rope: _Section, layer: _Section) -> RopeScaling:
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
    top: _Section, layer: _Section, vocabulary: int, speculators: bool
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
        eagle.expect(use_aux_hidden_state=True)
        shape["norm_before_fc"] |= bool(eagle.take("norm_before_fc", False))
        ids = _by_output(eagle.take("eagle_aux_hidden_state_layer_ids"), ids)
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


def _blocks(
    top: _Section, method: str, vocabulary: int, window: int | None, speculators: bool
) -> tuple[dict[str, Any], list[int] | None]:
    """What only drafts of blocks have, and the layers' ids as the layout counts them."""
    top.expect(use_gemma_norm=False, use_swa=False)
    # Full layers see the whole block and sliding ones nothing ahead, unless a file says otherwise.
    causal, non_causal = top.take("is_causal"), top.take("sliding_window_non_causal")
    ahead = window is not None and (causal is False if non_causal is None else bool(non_causal))
    if causal is not None and causal != (window is not None and not ahead):
        raise Refusal(
            f"its is_causal is {causal!r} and its sliding_window_non_causal {non_causal!r}: here full layers see the "
            "whole block, and sliding ones what both say"
        )
    own = top if speculators else top.section("dspark_config" if "dspark_config" in top.left else "dflash_config")
    own.expect(
        causal=False, use_swa=False, use_gemma_norm=False, output_multiplier=1.0, input_embedding_scale=1.0,
        attention_sink_bias=False, attention_value_scale=1.0, final_logit_softcapping=0.0, projector_type="dflash",
    )  # fmt: skip
    if method != "dflash2":
        own.expect(**dict.fromkeys(DFLASH2, 0))
    mask, named = _either(own, top, "mask_token_id"), own.take("mask_token")
    if mask is None:
        raise Refusal(f"it has no mask_token_id (its mask_token is {named!r}): add the token's id to its config.json")
    ids = own.take("aux_hidden_state_layer_ids") if speculators else _either(own, top, "target_layer_ids")
    if ids is None:
        raise Refusal("its dflash_config names no target_layer_ids: add them")
    shape = {"fc_norm": False, "block_size": _either(own, top, "block_size"), "mask_token_id": mask}
    shape |= _layout(own, top, method, speculators)
    if own is not top:
        own.all_taken()
    size = top.take("draft_vocab_size")
    pruned = None if size in (None, vocabulary) else size
    return shape | {"vocab_size": pruned, "sliding_sees_ahead": ahead}, ids


def _layout(own: _Section, top: _Section, method: str, speculators: bool) -> dict[str, Any]:
    """Which rows propose, and a DSpark draft's heads.

    Without the flag, engines read a DSpark draft with the anchor first, but one of `speculators` without it (vLLM).
    """
    first = _either(own, top, "sample_from_anchor")
    if method == "dflash":
        return {"sample_from_anchor": bool(first)}
    if method == "dflash2":
        if first:
            raise Refusal(
                "its sample_from_anchor is true, and DFlash 2 drafts have no anchor first: give another draft"
            )
        return {name: own.need(name) for name in DFLASH2}
    if not (not speculators if first is None else first):
        raise Refusal(
            f"its sample_from_anchor is {first!r}, and DSpark drafts here have the anchor first: in the other layout "
            "every row means another token. Give another draft, or set the flag right if you know that it is wrong"
        )
    rank = _either(own, top, "markov_rank")
    if not rank:
        raise Refusal("its markov_rank is missing: a DSpark draft without a Markov head is a DFlash draft")
    heads = [_either(own, top, name) for name in ("enable_confidence_head", "confidence_head_with_markov")]
    confidence, reads_token = (True if flag is None else bool(flag) for flag in heads)
    kind = _either(own, top, "markov_head_type") or "vanilla"
    return {
        "markov_rank": rank, "markov_head": kind, "confidence_head": confidence, "confidence_reads_token": reads_token,
    }  # fmt: skip


def _either(own: _Section, top: _Section, name: str) -> Any:
    """A setting that may stand in both sections. Raises Refusal where they differ."""
    found = [section.take(name) for section in {id(own): own, id(top): top}.values()]
    given = [value for value in found if value is not None]
    if any(value != given[0] for value in given):
        raise Refusal(f"its {name} is {given[0]!r} in {own.place.rstrip('.')} and {given[1]!r} beside it: correct it")
    return given[0] if given else None
