"""What the `config.json` of a published draft says: which of our methods it is, of which shape. Reads settings only.

Known are the layouts of `speculators` (0.9.0) and of the methods' authors, which SGLang reads. What our methods do not
have is refused by its name: such a draft would load wherever sizes agree, and know nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from infra.refusal import Refusal

Layout = Literal["speculators", "sglang"]
EAGLE3 = {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle"}
DFLASH = {"DFlashDraftModel"}


@dataclass(frozen=True)
class PublishedDraft:
    """A published draft, without its weights."""

    layout: Layout
    method: Literal["eagle3", "dflash"]
    shape: dict[str, Any]
    """Fields of the method's configuration that say what the draft is."""
    aux_layer_ids: tuple[int, ...] | None
    """Layer ids in our numbering; None: unspecified, so the engine's default is meant."""
    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    """Size of the target's vocabulary."""
    target: str | None
    """The target it was trained for, if specified."""


def read_published(settings: Mapping[str, Any]) -> PublishedDraft:
    """Raises Refusal, with the setting, for what none of our methods is."""
    try:
        return _read(settings)
    except Refusal:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise Refusal(
            f"config.json of the draft is damaged or incomplete ({type(error).__name__}: {error}): correct it, or "
            "fetch the draft again"
        ) from error


def _read(settings: Mapping[str, Any]) -> PublishedDraft:
    if "speculators_model_type" in settings:
        return _speculators(settings)
    named = set(settings.get("architectures") or [])
    if named & EAGLE3:
        return _eagle3("sglang", settings, settings)
    if named & DFLASH:
        return _dflash("sglang", settings, settings)
    raise Refusal(
        f"its architectures {sorted(named)} are none that can be taken over: EAGLE-3 ({', '.join(sorted(EAGLE3))}), "
        f"DFlash ({', '.join(DFLASH)}) or the speculators layout. Give another draft"
    )


def default_layers(target_layers: int) -> tuple[int, ...]:
    """What engines read where an EAGLE-3 draft names no layers: inputs of layers 2, n // 2 and n - 3."""
    return (1, target_layers // 2 - 1, target_layers - 4)


def _speculators(settings: Mapping[str, Any]) -> PublishedDraft:
    method, layer = settings["speculators_model_type"], settings.get("transformer_layer_config") or {}
    if method == "eagle3":
        _refuse(layer, {"model_type": "llama"})
        return _eagle3("speculators", layer, settings)
    if method == "dflash":
        return _dflash("speculators", layer, settings)
    raise Refusal(f"its speculators_model_type {method!r} cannot be taken over: give an eagle3 or dflash draft")


def _eagle3(layout: Layout, layer: Mapping[str, Any], settings: Mapping[str, Any]) -> PublishedDraft:
    _refuse(settings, {"norm_before_residual": False, "use_aux_norm": False})
    _refuse(layer, {"num_hidden_layers": 1, "mlp_bias": False})
    shape = _attention(layer) | {
        name: bool(settings.get(name)) for name in ("fc_norm", "norm_before_fc", "norm_output")
    }
    vocabulary, size = int(layer["vocab_size"]), settings.get("draft_vocab_size")
    # Without a size the head is the target's.
    shape |= {"vocab_size": None if size in (None, vocabulary) else size, "shared_head": size is None}
    if layout == "speculators":
        ids = settings.get("eagle_aux_hidden_state_layer_ids")
        ids = ids and [layer_id - 1 for layer_id in ids]
    else:
        eagle = settings.get("eagle_config") or {}
        _refuse(eagle, {"use_aux_hidden_state": True})
        shape["norm_before_fc"] |= bool(eagle.get("norm_before_fc"))
        ids = eagle.get("eagle_aux_hidden_state_layer_ids")
    return _published(layout, "eagle3", shape, ids, layer, settings)


def _dflash(layout: Layout, layer: Mapping[str, Any], settings: Mapping[str, Any]) -> PublishedDraft:
    types = layer.get("layer_types") or ["full_attention"] * layer["num_hidden_layers"]
    window = layer.get("sliding_window") if "sliding_attention" in types else None
    own = settings if layout == "speculators" else settings.get("dflash_config") or {}
    _refuse(settings, {"sample_from_anchor": False})
    if window is not None:
        _refuse(settings, {"sliding_window_non_causal": False})
    if layout == "speculators":
        _refuse(settings, {"draft_vocab_size": layer["vocab_size"]})
        ids = [layer_id - 1 for layer_id in own["aux_hidden_state_layer_ids"]]
    else:
        ids = own.get("target_layer_ids")
        if ids is None:
            raise Refusal("its dflash_config names no target_layer_ids: add them")
    block = settings.get("block_size") or own.get("block_size")
    shape = _attention(layer) | {"layer_types": list(types), "sliding_window": window, "block_size": block}
    shape |= {"mask_token_id": own.get("mask_token_id"), "fc_norm": False}
    return _published(layout, "dflash", shape, ids, layer, settings)


def _published(
    layout: Layout,
    method: Literal["eagle3", "dflash"],
    shape: dict[str, Any],
    ids: list[int] | None,
    layer: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> PublishedDraft:
    hidden = int(layer["hidden_size"])
    verifier = (settings.get("speculators_config") or {}).get("verifier") or {}
    return PublishedDraft(
        layout=layout,
        method=method,
        shape=shape,
        aux_layer_ids=None if ids is None else tuple(ids),
        hidden_size=hidden,
        target_hidden_size=int(settings.get("target_hidden_size") or hidden),
        vocab_size=int(layer["vocab_size"]),
        target=verifier.get("name_or_path"),
    )


def _attention(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Attention settings of a Llama or Qwen3 layer, with Hugging Face's defaults."""
    _refuse(layer, {"attention_bias": False, "hidden_act": "silu"})
    rope = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise Refusal(f"its rope_type is {kind!r}, drafts here have the default one: give another draft")
    heads = int(layer["num_attention_heads"])
    return {
        "num_heads": heads,
        "num_kv_heads": int(layer.get("num_key_value_heads") or heads),
        "head_dim": int(layer.get("head_dim") or layer["hidden_size"] // heads),
        "intermediate_size": int(layer["intermediate_size"]),
        "rope_theta": float(rope.get("rope_theta") or layer.get("rope_theta") or 10_000.0),
        "rms_norm_eps": float(layer.get("rms_norm_eps", 1e-6)),
    }


def _refuse(settings: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for name, value in expected.items():
        found = settings.get(name, value)
        if found is not None and found != value:
            raise Refusal(f"its {name} is {found!r}, drafts here have {value!r}: give another draft")
