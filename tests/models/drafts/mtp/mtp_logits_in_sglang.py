"""`python mtp_logits_in_sglang.py FOLDER...`, in SGLang's environment: MTP layers in SGLang's own classes.

A FOLDER holds config.json, model.safetensors and inputs.safetensors; writes outputs.safetensors. Over all rows at once
as after a prefill, then from the last row on, step by step, each with the output of the step before.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models.registry import ModelRegistry
from sglang_alone import Attention, load_weights, own_dtype, stand_alone


@torch.no_grad()
def answer(folder: Path) -> None:
    # As a server finds the class of a draft that is its target.
    config = ModelConfig(str(folder), is_draft_model=True).hf_config
    own_dtype(config)
    kind, _ = ModelRegistry.resolve_model_cls(config.architectures)
    draft = kind(config).eval()
    left_out = load_weights(draft, folder)
    inputs = load_file(folder / "inputs.safetensors")
    tables = {"model.embed_tokens.weight": inputs["embedding"], "lm_head.weight": inputs["head"]}
    assert left_out == set(tables), left_out
    layer = draft.model.mtp_block
    nothing = torch.empty(0, layer.self_attn.kv_size)
    layer.self_attn.attn = Attention(layer.self_attn.attn, nothing, nothing)
    hidden, tokens, count = inputs["last"], inputs["tokens"], len(inputs["last"])
    logits = []
    for first in (0, *range(count, len(tokens))):
        ids = tokens[:count] if first == 0 else tokens[first : first + 1]
        positions = torch.arange(first, first + len(ids))
        batch = SimpleNamespace(spec_info=SimpleNamespace(hidden_states=hidden), forward_mode=ForwardMode.DECODE)
        hidden = draft.model(ids, positions, batch, input_embeds=inputs["embedding"][ids].clone())
        logits.append(hidden @ inputs["head"].T)
        hidden = hidden[-1:]
    save_file({"logits": torch.cat(logits)}, folder / "outputs.safetensors")


if __name__ == "__main__":
    folders = [Path(argument) for argument in sys.argv[1:]]
    stand_alone(folders[0])
    for one in folders:
        answer(one)
