"""Rotations by three axes are those of transformers' own multimodal families."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen2_5_VLTextConfig, Qwen3VLTextConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from models.config.eagle3 import Eagle3Config
from models.drafts.rope import pair_positions, rotary_tables

FAMILIES: dict[str, tuple[Any, Any, list[int], bool]] = {
    "Qwen2.5-VL": (Qwen2_5_VLTextConfig, Qwen2_5_VLRotaryEmbedding, [16, 24, 24], False),
    "Qwen3-VL": (Qwen3VLTextConfig, Qwen3VLTextRotaryEmbedding, [24, 20, 20], True),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_pairs_turn_by_the_axes_that_the_target_gives_them(family: str) -> None:
    kind, rotary, section, interleaved = FAMILIES[family]
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": section, "mrope_interleaved": interleaved}
    config = kind(hidden_size=256, num_attention_heads=2, num_key_value_heads=2, head_dim=128, rope_parameters=rope)
    places = torch.randint(3000, (50, 3))
    cos, sin = rotary(config)(torch.zeros(1), places.T[:, None])
    sizes = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 128, "intermediate_size": 8, "rope_theta": 1e6}
    shape = Eagle3Config(**sizes, mrope_section=tuple(section), mrope_interleaved=interleaved)
    assert shape.axes is not None
    found = rotary_tables(pair_positions(places, shape.axes), shape)
    for ours, theirs in zip(found, (cos, sin), strict=True):
        # Their angles are float32.
        assert (ours[:, 0] - theirs[0, :, :64]).abs().max() < 5e-4
    assert not torch.equal(found[0], rotary_tables(places[:, 0], shape)[0])


@pytest.mark.parametrize("high", [1.0, 4.0], ids=["Llama 4 Scout", "Llama 3.1"])
def test_low_frequencies_are_divided_as_in_llama(high: float) -> None:
    rope = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": high}
    rope |= {"original_max_position_embeddings": 8192}
    config = LlamaConfig(hidden_size=256, num_attention_heads=2, rope_parameters=rope | {"rope_theta": 5e5})
    along = torch.randint(3000, (50,))
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), along[None])
    sizes = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 128, "intermediate_size": 8, "rope_theta": 5e5}
    found = rotary_tables(along, Eagle3Config(**sizes, rope_scaling=rope))
    for ours, theirs in zip(found, (cos, sin), strict=True):
        assert (ours[:, 0] - theirs[0, :, :64]).abs().max() < 5e-4


def test_on_text_the_axes_change_nothing() -> None:
    sizes = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 16, "intermediate_size": 8}
    shape, along = Eagle3Config(**sizes, mrope_section=(4, 2, 2)), torch.arange(30)
    assert shape.axes is not None
    of_pairs = pair_positions(along[:, None].expand(-1, 3), shape.axes)
    for three, one in zip(rotary_tables(of_pairs, shape), rotary_tables(along, shape), strict=True):
        assert torch.equal(three, one)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mrope_section": (4, 2, 1)}, "has 7 pairs, and 8 of a head are rotated"),
        ({"mrope_interleaved": True}, r"there is no draft\.mrope_section"),
        (
            {"mrope_section": (4, 2, 2), "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "is ignored by engines where mrope_section is set",
        ),
    ],
)
def test_axes_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    sizes = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 16, "intermediate_size": 8}
    with pytest.raises(ValueError, match=message):
        Eagle3Config(**sizes, **settings)
