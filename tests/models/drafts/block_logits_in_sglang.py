"""`python block_logits_in_sglang.py FOLDER...`, in SGLang's environment: block drafts in SGLang's own classes.

A FOLDER holds config.json, model.safetensors and inputs.safetensors; writes outputs.safetensors. The cache begins with
what the class projects from the features. A DSpark draft's bias and confidence, and a Domino draft's correction, are
those after the tokens `previous`.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from sglang.srt.models import dflash, dspark
from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
from sglang.srt.speculative.domino_utils import domino_greedy_rollout
from sglang.srt.utils.hf_transformers_utils import get_config
from sglang_alone import Attention, load_weights, own_dtype, stand_alone


@torch.no_grad()
def answer(folder: Path) -> None:
    config = get_config(str(folder), trust_remote_code=False)
    (model,) = (one for one in (*dflash.EntryClass, *dspark.EntryClass) if [one.__name__] == config.architectures)
    dtype = own_dtype(config)
    draft = model(config).eval()
    # SGLang keeps the confidence head in float32.
    own = {name: parameter.dtype for name, parameter in draft.named_parameters() if "confidence" not in name}
    assert set(own.values()) == {dtype}, own
    left_out = load_weights(draft, folder)
    assert not left_out, left_out
    inputs = load_file(folder / "inputs.safetensors")
    count = len(inputs["aux"])
    fused = draft.project_target_hidden(inputs["aux"])
    for layer in draft.layers:
        attention = layer.self_attn
        # Of two ways to the same values the one without a Triton kernel, which needs a GPU.
        attention.use_table_qk_norm_rope = False
        keys, values = attention.kv_proj_only(draft.prepare_context_hidden_for_kv(layer, fused))
        keys = attention.apply_k_rope(torch.arange(count), attention.apply_k_norm(keys))
        attention.attn = Attention(attention.attn, keys, values)
    parsed = parse_dflash_draft_config(draft_hf_config=config)
    block = torch.full((draft.block_size,), parsed.mask_token_id)
    block[0] = inputs["token"]
    positions = torch.arange(count, count + draft.block_size)
    embeddings = inputs["embedding"][block]
    out = draft(block, positions, None, input_embeds=embeddings)
    hidden = out.hidden_states
    if draft.prefix_gru is not None:
        found = corrected(draft, hidden, inputs)
    elif "previous" in inputs:
        found = sequential(draft, hidden, inputs)
    elif draft.candidate_selector is not None:
        found = selected(draft, hidden[1:], inputs)
    else:
        found = {"logits": hidden[1:] @ inputs["head"].T}
    save_file(found, folder / "outputs.safetensors")
    said = {"block_size": draft.block_size, "target_layer_ids": parsed.target_layer_ids}
    (folder / "outputs.json").write_text(json.dumps(said))


def selected(draft: Any, hidden: torch.Tensor, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A DFlash 2 draft's candidates of every position, and their scores after the likeliest one before."""
    logits, candidates = (hidden @ inputs["head"].T).topk(draft.candidate_selector.top_k)
    scores = draft.candidate_selector.build_lattice(
        candidate_ids=candidates[None],
        unary_logits=logits[None],
        hidden_states=hidden[None],
        anchor_token_ids=inputs["token"],
    )
    return {"candidates": candidates, "scores": scores[0, :, 0].contiguous()}


def corrected(draft: Any, hidden: torch.Tensor, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A Domino draft's logits after the tokens `previous`, by SGLang's modules, and what SGLang proposes by itself."""
    embedding = torch.nn.Embedding.from_pretrained(inputs["embedding"])
    rows = hidden[:-1] if draft.shift_label else hidden[1:]
    states, _ = draft.prefix_gru(embedding(inputs["previous"])[None])
    added = draft.embed_proj(torch.cat([rows, states[0]], dim=-1))
    added[0] = 0
    proposals = domino_greedy_rollout(
        draft_hidden=hidden[None],
        bonus_tokens=inputs["token"],
        target_embedding=embedding,
        lm_head_weight=inputs["head"],
        prefix_gru=draft.prefix_gru,
        embed_proj=draft.embed_proj,
        vocab_size=len(inputs["head"]),
        shift_label=draft.shift_label,
        candidate_pool_size=0,
        in_cuda_graph=False,
    )
    return {"logits": rows @ inputs["head"].T + added, "proposals": proposals[0]}


def sequential(
    draft: torch.nn.Module, hidden: torch.Tensor, inputs: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """A DSpark draft's logits and confidences of every row."""
    previous, rows = inputs["previous"], []
    state = draft.markov_head.init_state(hidden[:1])
    for step in range(len(hidden)):
        row = hidden[step : step + 1]
        bias, state = draft.markov_head.step_bias(previous[step : step + 1], hidden_states=row, state=state)
        rows.append((row @ inputs["head"].T + bias)[0])
    found = {"logits": torch.stack(rows)}
    given = {"anchor_tokens": previous[:1], "draft_tokens": torch.cat([previous[1:], previous[:1]])[None]}
    found["confidences"] = draft.compute_confidence(confidence_features=hidden, **given)[1][0]
    return found


if __name__ == "__main__":
    # Other modes build no confidence head.
    os.environ["SGLANG_RAGGED_VERIFY_MODE"] = "compact"
    folders = [Path(argument) for argument in sys.argv[1:]]
    stand_alone(folders[0])
    for one in folders:
        answer(one)
