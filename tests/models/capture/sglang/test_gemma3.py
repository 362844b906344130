"""Gemma 3's layer in the real SGLang, found through the real plugin registry, without a capture of ours."""

import subprocess

import pytest

from infra.sglang.command import sglang_python

PROGRAM = """
from types import SimpleNamespace as Part

from sglang.srt.plugins import load_plugins

load_plugins()

import torch
from sglang.srt.models.gemma3_causal import Gemma3DecoderLayer, Gemma3ForCausalLM


class Attention:
    is_sliding = False

    def __call__(self, hidden_states, **_):
        return 2 * hidden_states


def add(hidden, residual=None):
    if residual is None:
        return hidden
    hidden += residual
    return hidden, hidden.clone()


layer = Part(
    input_layernorm=add, self_attn=Attention(), post_attention_layernorm=lambda x: x, pre_feedforward_layernorm=add,
    mlp=lambda x: 10 * x, post_feedforward_layernorm=lambda x: x,
)
model = Part(model=Part(layers=[layer], norm=torch.nn.Identity()), config=Part(num_hidden_layers=1))


def outputs():
    hidden, residual = torch.ones(1), torch.ones(1)
    output = Gemma3DecoderLayer.forward(
        layer, positions=None, hidden_states=hidden, position_embeddings_global=None, position_embeddings_local=None,
        forward_batch=None, residual=residual,
    )
    return [part.item() for part in (*output, hidden)]


plain = outputs()
Gemma3ForCausalLM.set_eagle3_layers_to_capture(model, [0])
print(*plain, *outputs())
"""


@pytest.mark.slow
def test_a_draft_of_an_engine_gets_the_whole_output(sglang_that_forks: None) -> None:
    """And the captured tensor survives the next layer's norm, which works in place."""
    command = [str(sglang_python()), "-c", PROGRAM]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    # 1 + 1 into attention, twice that comes out; 2 + 4 into the MLP, ten times that comes out, 6 is left to add.
    assert ended.stdout.split()[-6:] == ["60.0", "6.0", "2.0", "66.0", "0.0", "1.0"]
