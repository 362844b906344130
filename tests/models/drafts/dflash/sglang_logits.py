"""`python sglang_logits.py FOLDER...`, in SGLang's environment: drafts in SGLang's own class, on given inputs.

A FOLDER holds config.json, model.safetensors and inputs.safetensors; writes outputs.safetensors. Only the cache of keys
and values is ours: a dictionary that holds what the class projects from the features, read under the mask that the
class asks its attention for.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.models import dflash
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.dflash_utils import parse_dflash_draft_config
from sglang.srt.utils.hf_transformers_utils import get_config
from torch.nn.functional import scaled_dot_product_attention


class Attention(torch.nn.Module):
    """In place of SGLang's radix attention."""

    def __init__(self, asked, keys, values):
        super().__init__()
        self.asked, self.keys, self.values = asked, keys, values

    def forward(self, q, k, v, _batch):
        heads, size = self.asked.tp_q_head_num, self.asked.head_dim
        keys, values = torch.cat([self.keys, k]), torch.cat([self.values, v])
        own = torch.arange(len(self.keys), len(keys))[:, None]
        other = torch.arange(len(keys))
        mask = torch.ones(len(q), len(keys), dtype=torch.bool)
        if self.asked.attn_type != AttentionType.ENCODER_ONLY:
            mask &= other <= own
        if self.asked.sliding_window_size > -1:
            mask &= other >= own - self.asked.sliding_window_size
        q, k, v = (x.view(len(x), -1, size).transpose(0, 1)[None] for x in (q, keys, values))
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.asked.scaling, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(-1, heads * size)


@torch.no_grad()
def answer(folder: Path) -> None:
    config = get_config(str(folder), trust_remote_code=False)
    (model,) = (one for one in dflash.EntryClass if [one.__name__] == config.architectures)
    draft = model(config).eval()
    for parameter in draft.parameters():
        parameter.data.fill_(torch.nan)
    draft.load_weights(load_file(folder / "model.safetensors").items())
    left_out = [name for name, parameter in draft.named_parameters() if parameter.isnan().any()]
    assert not left_out, left_out
    inputs = load_file(folder / "inputs.safetensors")
    count = len(inputs["aux"])
    fused = draft.project_target_hidden(inputs["aux"])
    for layer in draft.layers:
        attention = layer.self_attn
        keys, values = attention.kv_proj_only(draft.prepare_context_hidden_for_kv(layer, fused))
        keys = attention.apply_k_rope(torch.arange(count), attention.apply_k_norm(keys))
        attention.attn = Attention(attention.attn, keys, values)
    parsed = parse_dflash_draft_config(draft_hf_config=config)
    block = torch.full((draft.block_size,), parsed.mask_token_id)
    block[0] = inputs["token"]
    positions = torch.arange(count, count + draft.block_size)
    embeddings = inputs["embedding"][block]
    out = draft(block, positions, None, input_embeds=embeddings)
    save_file({"logits": out.hidden_states[1:] @ inputs["head"].T}, folder / "outputs.safetensors")
    said = {"block_size": draft.block_size, "target_layer_ids": parsed.target_layer_ids}
    (folder / "outputs.json").write_text(json.dumps(said))


def stand_alone(folder: Path) -> None:
    """SGLang's layers ask for the process group that they are sharded over: here it is of one."""
    chosen = {"device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch"}
    args = ServerArgs(model_path=str(folder), grammar_backend="none", mem_fraction_static=0.5, **chosen)
    publish(args, role="test", ranks=SpawnRanks(world_rank=0))
    meeting = f"file://{folder}/meeting"
    init_distributed_environment(world_size=1, rank=0, local_rank=0, backend="gloo", distributed_init_method=meeting)
    initialize_model_parallel(backend="gloo")


if __name__ == "__main__":
    torch.set_num_threads(1)
    folders = [Path(argument) for argument in sys.argv[1:]]
    stand_alone(folders[0])
    for one in folders:
        answer(one)
