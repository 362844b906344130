"""`python sglang_logits.py FOLDER...`, in SGLang's environment: EAGLE-3 drafts in SGLang's own class, on given inputs.

A FOLDER holds config.json, model.safetensors and inputs.safetensors; writes outputs.safetensors. Over all rows at once
as after a prefill, then from the last row on, step by step, each with the output of the step before.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
from sglang.srt.models.kimi_k25_eagle3 import Eagle3DeepseekV2ForCausalLM
from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3
from sglang.srt.utils.hf_transformers_utils import get_config
from sglang_alone import Attention, load_weights, own_dtype, stand_alone

CLASSES = {each.__name__: each for each in (LlamaForCausalLMEagle3, Eagle3DeepseekV2ForCausalLM)}


def remember(draft: torch.nn.Module) -> None:
    """Replace SGLang's attention kernels, which need a server's cache."""
    if isinstance(draft, Eagle3DeepseekV2ForCausalLM):
        latent = draft.model.midlayer.self_attn
        asked = latent.attn_mqa
        latent.attn_mqa = Attention(asked, torch.empty(0, 1, asked.head_dim), torch.empty(0, 1, asked.v_head_dim))
        # As with the kernels of GPUs: all heads read the latent vectors.
        latent.dispatch_attn_forward_method = lambda _batch: AttnForwardMethod.MLA
        return
    for layer in draft.model.layers:
        attention = layer.self_attn
        nothing = torch.empty(0, attention.kv_size)
        attention.attn = Attention(attention.attn, nothing, nothing)


@torch.no_grad()
def answer(folder: Path) -> None:
    config = get_config(str(folder), trust_remote_code=False)
    dtype = own_dtype(config)
    draft = CLASSES[config.architectures[0]](config).eval()
    assert {parameter.dtype for parameter in draft.parameters()} == {dtype}
    inputs = load_file(folder / "inputs.safetensors")
    left_out = load_weights(draft, folder)
    # What the server puts in from the target.
    own = draft.model.embed_tokens.weight if config.hidden_size != config.target_hidden_size else None
    expected = set() if own is not None else {"model.embed_tokens.weight"}
    assert left_out == expected | ({"lm_head.weight"} if draft.load_lm_head_from_target else set())
    embedding = inputs["embedding"] if own is None else own[: config.vocab_size]
    head = draft.lm_head.weight.data[: config.draft_vocab_size]  # SGLang pads tables
    if draft.load_lm_head_from_target:
        head = inputs["head"]
    remember(draft)
    hidden, tokens, count = inputs["aux"], inputs["tokens"], len(inputs["aux"])
    logits = []
    for first in (0, *range(count, len(tokens))):
        ids = tokens[:count] if first == 0 else tokens[first : first + 1]
        positions = torch.arange(first, first + len(ids))
        batch = SimpleNamespace(
            spec_info=SimpleNamespace(hidden_states=hidden), forward_mode=ForwardMode.DECODE, attn_cp_metadata=None
        )
        normed, (fed_back,) = draft.model(ids, positions, batch, input_embeds=embedding[ids])
        logits.append(normed @ head.T)
        hidden = fed_back[-1:]
    said = {"logits": torch.cat(logits)}
    if draft.hot_token_id is not None:
        said["target_ids"] = draft.hot_token_id
    save_file(said, folder / "outputs.safetensors")


if __name__ == "__main__":
    folders = [Path(argument) for argument in sys.argv[1:]]
    stand_alone(folders[0])
    for one in folders:
        answer(one)
