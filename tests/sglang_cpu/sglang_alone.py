"""SGLang's own draft classes without its server: one process, given inputs, and a cache that tests can follow."""

from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from safetensors.torch import load_file
from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs
from torch.nn.functional import scaled_dot_product_attention


class Attention(torch.nn.Module):
    """In place of SGLang's radix attention: remembers all keys and values, under the mask that the class asks for."""

    def __init__(self, asked, keys, values):
        super().__init__()
        self.asked, self.keys, self.values = asked, keys, values

    def forward(self, q, k, v, _batch, **_):
        heads, sizes = self.asked.tp_q_head_num, (self.asked.head_dim, self.asked.head_dim, self.asked.v_head_dim)
        own = torch.arange(len(self.keys), len(self.keys) + len(k))[:, None]
        self.keys, self.values = torch.cat([self.keys, k]), torch.cat([self.values, v])
        other = torch.arange(len(self.keys))
        mask = torch.ones(len(q), len(self.keys), dtype=torch.bool)
        if self.asked.attn_type != AttentionType.ENCODER_ONLY:
            mask &= other <= own
        if self.asked.sliding_window_size > -1:
            mask &= other >= own - self.asked.sliding_window_size
        given = zip((q, self.keys, self.values), sizes, strict=True)
        q, k, v = (x.view(len(x), -1, size).transpose(0, 1)[None] for x, size in given)
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.asked.scaling, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(-1, heads * self.asked.v_head_dim)


def own_dtype(config: Any) -> torch.dtype:
    """Make the data type of an export the default for the parameters to come, as its server does; returns it."""
    torch.set_default_dtype(config.dtype)
    return config.dtype


def load_weights(draft: Any, folder: Path) -> set[str]:
    """As its server does; the names of the parameters that are not in the file, which hold no number then."""
    for parameter in draft.parameters():
        parameter.data.fill_(torch.nan)
    draft.load_weights(load_file(folder / "model.safetensors").items())
    return {name for name, parameter in draft.named_parameters() if parameter.isnan().any()}


def stand_alone(folder: Path) -> None:
    """SGLang's layers ask for the process group that they are sharded over: here it is of one."""
    torch.set_num_threads(1)
    torch._dynamo.config.disable = True  # a machine of a person who runs the tests may lack a C++ compiler
    chosen = {"device": "cpu", "attention_backend": "torch_native", "sampling_backend": "pytorch"}
    args = ServerArgs(model_path=str(folder), grammar_backend="none", mem_fraction_static=0.5, **chosen)
    publish(args, role="test", ranks=SpawnRanks(world_rank=0))
    meeting = f"file://{folder}/meeting"
    init_distributed_environment(world_size=1, rank=0, local_rank=0, backend="gloo", distributed_init_method=meeting)
    initialize_model_parallel(backend="gloo")
