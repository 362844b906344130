"""What only drafts of blocks say in a published `config.json`."""

from typing import Any

from infra.refusal import Refusal
from models.export.published_section import Section

DFLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
"""Settings of DFlash 2, which DFlash does not have."""


def of_blocks(
    top: Section, method: str, vocabulary: int, window: int | None, speculators: bool
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
        attention_sink_bias=False, attention_value_scale=1.0, final_logit_softcapping=0.0,
    )  # fmt: skip
    for section in (own, top):
        if method == "dspark" and section.left.get("projector_type") == "dspark":
            section.take("projector_type")  # SpecForge's name; DeepSpec's drafts have DFlash's
        section.expect(projector_type="domino" if method == "domino" else "dflash")
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


def _layout(own: Section, top: Section, method: str, speculators: bool) -> dict[str, Any]:
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
    if method == "domino":
        return _domino(own, top, first)
    if not (not speculators if first is None else first):
        raise Refusal(
            f"its sample_from_anchor is {first!r}, and DSpark drafts here have the anchor first: in the other layout "
            "every row means another token. Give another draft, or set the flag right if you know that it is wrong"
        )
    # Of SpecForge: the weight of a loss, and whether heads of keys and values are shared, which their number says.
    for name in ("confidence_head_alpha", "attention_mode"):
        _either(own, top, name)
    rank = _either(own, top, "markov_rank")
    if not rank:
        raise Refusal("its markov_rank is missing: a DSpark draft without a Markov head is a DFlash draft")
    heads = [_either(own, top, name) for name in ("enable_confidence_head", "confidence_head_with_markov")]
    confidence, reads_token = (True if flag is None else bool(flag) for flag in heads)
    kind = _either(own, top, "markov_head_type") or "vanilla"
    return {
        "markov_rank": rank, "markov_head": kind, "confidence_head": confidence, "confidence_reads_token": reads_token,
    }  # fmt: skip


def _domino(own: Section, top: Section, first: bool | None) -> dict[str, Any]:
    """Which rows of a Domino draft propose, and the sizes of its head."""
    for section in (own, top):
        section.expect(pure_draft_prefix_len=1)
    shifted = _either(own, top, "shift_label")
    if not isinstance(shifted, bool) or first not in (None, shifted):
        raise Refusal(
            f"its shift_label is {shifted!r} and its sample_from_anchor {first!r}: the first must be true or false, "
            "and the second the same or missing, so correct it"
        )
    return {"sample_from_anchor": shifted} | {name: _either(own, top, name) for name in ("gru_hidden_dim", "emb_dim")}


def _either(own: Section, top: Section, name: str) -> Any:
    """A setting that may stand in both sections. Raises Refusal where they differ."""
    found = [section.take(name) for section in {id(own): own, id(top): top}.values()]
    given = [value for value in found if value is not None]
    if any(value != given[0] for value in given):
        raise Refusal(f"its {name} is {given[0]!r} in {own.place.rstrip('.')} and {given[1]!r} beside it: correct it")
    return given[0] if given else None
