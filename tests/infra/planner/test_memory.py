"""Predicted memory of a trainer against what torch's allocator saw, on drafts that take a second."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from trainer_memory import Point, built, measured_peak

from infra.planner.memory import Setting, longest_sample, loss_chunk_tokens, rank_memory, usable
from infra.planner.shapes import Precision, muon_flops
from models.config.draft import parse_draft_config

LAYER = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "intermediate_size": 128}
EAGLE3 = {"method": "eagle3", "vocab_size": 256, "ttt_steps": 3, **LAYER}
WIDE = {"layer_types": ["full_attention"] * 2, "qk_norm": True, "attention_bias": True, "norm_before_residual": True}
MLA = {"q_lora_rank": 24, "kv_lora_rank": 40, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 12}
LATENT = {name: value for name, value in EAGLE3.items() if name not in ("num_kv_heads", "head_dim")} | {"mla": MLA}
DIRECT = LATENT | {"mla": MLA | {"q_lora_rank": None, "v_head_dim": 16}}
LATENT_HEADS = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 16}
BLOCKS = {"block_size": 4, "anchors": 32, **LAYER}
MTP = {"method": "mtp", "family": "mimo", "attention_bias": True, **LAYER}
QWEN = {"method": "mtp", "family": "qwen", "qk_norm": True, "gated_attention": True, **LAYER}
ROUTED = {"count": 6, "per_token": 2, "intermediate_size": 48, "shared_size": 32}
MIXED = {**QWEN, "experts": ROUTED | {"scoring": "softmax"}}
DEEPSEEK = {"method": "mtp", "family": "deepseek", **LATENT_HEADS, "mla": MLA, "intermediate_size": 128}
DEEPSEEK |= {"experts": ROUTED | {"scoring": "sigmoid", "groups": 3, "groups_per_token": 2}}
DOMINO = {"method": "domino", **BLOCKS, "gru_hidden_dim": 48, "emb_dim": 24}
RECURRENT = {"markov_rank": 24, "markov_head": "rnn", "vocab_size": 256}
POINTS = [
    Point(64, 512, EAGLE3, (96,), name="eagle3"),
    Point(64, 512, EAGLE3, (96,), "bfloat16", name="eagle3 bfloat16"),
    Point(64, 512, {**EAGLE3, "ttt_steps": 2, "loss": "lk_alpha"}, (300, 80), chunk_tokens=128, name="eagle3 packed"),
    Point(64, 512, EAGLE3, (600,), recompute=True, name="eagle3 recomputed"),
    Point(64, 512, {**EAGLE3, **WIDE}, (150, 60), name="eagle3, two layers with norms and biases"),
    Point(64, 512, {**EAGLE3, **WIDE}, (600,), recompute=True, name="the same recomputed"),
    Point(64, 512, {**EAGLE3, "hidden_size": 48}, (150,), "bfloat16", name="eagle3 of its own size"),
    Point(64, 512, LATENT, (150,), name="eagle3 with MLA"),
    Point(64, 512, LATENT, (150, 60), "bfloat16", name="eagle3 with MLA, bfloat16"),
    Point(64, 512, LATENT, (600,), recompute=True, name="eagle3 with MLA, recomputed"),
    Point(64, 512, DIRECT, (150,), name="eagle3 with MLA, direct queries"),
    Point(64, 512, EAGLE3, (96,), name="eagle3, Muon", optimizer="muon"),
    Point(64, 512, EAGLE3, (96,), "bfloat16", name="eagle3, bfloat16, Muon", optimizer="muon"),
    Point(64, 512, {"method": "dflash", **BLOCKS}, (200,), name="dflash, Muon", optimizer="muon"),
    Point(64, 512, {"method": "medusa", "vocab_size": 256}, (200,), name="medusa"),
    Point(64, 512, {"method": "dflash", **BLOCKS}, (200,), name="dflash"),
    Point(64, 512, {"method": "dspark", **BLOCKS, "markov_rank": 24}, (200,), name="dspark"),
    Point(64, 512, {"method": "dspark", **BLOCKS, **RECURRENT}, (200,), "bfloat16", name="dspark, recurrent, bfloat16"),
    Point(64, 512, {"method": "dflash2", **BLOCKS, "selector_rank": 24}, (200,), name="dflash2"),
    Point(64, 512, {"method": "dflash2", **BLOCKS, "selector_rank": 24}, (200,), "bfloat16", name="dflash2, bfloat16"),
    Point(64, 512, DOMINO, (200,), name="domino"),
    Point(64, 512, DOMINO, (200,), "bfloat16", name="domino, bfloat16"),
    Point(64, 512, MTP, (150, 60), aux=0, name="mtp"),
    Point(64, 512, MTP, (600,), recompute=True, aux=0, name="mtp, recomputed"),
    Point(64, 512, QWEN, (200,), "bfloat16", aux=0, name="mtp, gated, bfloat16"),
    Point(64, 512, MIXED, (200,), aux=0, name="mtp, experts"),
    Point(64, 512, MIXED, (200,), "bfloat16", aux=0, name="mtp, experts, bfloat16"),
    Point(64, 512, DEEPSEEK, (150, 60), aux=0, name="mtp, experts and MLA"),
    Point(64, 512, DEEPSEEK, (600,), "bfloat16", recompute=True, aux=0, name="the same, recomputed, bfloat16"),
    Point(64, 512, MIXED, (96,), aux=0, name="mtp, experts, Muon", optimizer="muon"),
    Point(64, 40_000, EAGLE3, (96,), "bfloat16", name="eagle3, built from two large tables"),
    Point(64, 40_000, EAGLE3, (96,), "bfloat16", tied=True, name="eagle3, built from a large table"),
]


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_the_predicted_peak_is_the_measured_one(point: Point) -> None:
    assert point.predicted().total == pytest.approx(measured_peak(point), rel=0.1)


def test_what_is_there_without_any_sample_is_counted_exactly() -> None:
    # Two peaks of one draft on short samples differ by what depends on samples alone.
    memory = POINTS[0].predicted()
    draft = POINTS[0].config.shape(POINTS[0].target, 3, "float32")
    assert memory.total - memory.features - memory.activations - memory.loss == 4 * (
        draft.parameters * 5 + 512 * 64 + 256 * 64
    )


def test_muon_keeps_one_moment_of_a_matrix() -> None:
    point = POINTS[0]
    draft = point.config.shape(point.target, 3, "float32")
    matrices = draft.matrix_parameters
    assert point.predicted().optimizer - replace(point, optimizer="muon").predicted().optimizer == 4 * matrices


@pytest.mark.parametrize("sizes", [(640, 1536, 8, 4, 80), (512, 1376, 8, 2, 64)])
def test_muons_arithmetic_is_what_torch_counts(sizes: tuple[int, int, int, int, int]) -> None:
    hidden, intermediate, heads, kv_heads, head_dim = sizes
    layer = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim, "intermediate_size": intermediate}
    point = Point(hidden, 256, EAGLE3 | layer, (8,), optimizer="muon")
    with FlopCounterMode(display=False) as counter:
        module, optimizer = built(point)
        for parameter in module.draft.parameters():
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
        optimizer.step()
    draft = point.config.shape(point.target, 3, "float32")
    assert muon_flops(draft, point.target) == pytest.approx(counter.get_total_flops(), rel=0.15)


def test_chunks_of_the_loss_by_device() -> None:
    """On a GPU as many positions as 512 MiB of draft logits hold: EAGLE-3's seven steps, a block's row of DFlash."""
    assert loss_chunk_tokens(7 * 32_000 * 2, on_cpu=True) == 256
    assert loss_chunk_tokens(7 * 32_000 * 2, on_cpu=False) == 1024
    assert loss_chunk_tokens(151_936 * 2, on_cpu=False) == 1536
    assert loss_chunk_tokens(16 * 262_144 * 4, on_cpu=False) == 256


def setting(precision: Precision) -> Setting:
    return Setting(
        aux_count=3, stored="bfloat16", precision=precision, top_token=True, whole_head=False, chunk_tokens=64,
        prefetch_steps=2, one_memory=False,
    )  # fmt: skip


@given(st.integers(min_value=3 * 2**30, max_value=2**37), st.sampled_from(["float32", "bfloat16"]))
def test_the_longest_sample_fits_and_one_token_more_does_not(memory: int, precision: Precision) -> None:
    target = POINTS[0].target
    draft = parse_draft_config(EAGLE3).shape(target, 3, precision)
    longest = longest_sample(draft, target, setting(precision), memory)
    assert rank_memory(draft, target, setting(precision), (longest,)).total <= usable(memory)
    assert rank_memory(draft, target, setting(precision), (longest + 1,)).total > usable(memory)


def test_no_sample_fits_where_the_draft_does_not() -> None:
    target = POINTS[0].target
    assert (
        longest_sample(parse_draft_config(EAGLE3).shape(target, 3, "float32"), target, setting("float32"), 2**30) == 0
    )


def test_ranks_that_share_a_sample_keep_a_part_of_its_activations_and_all_of_its_keys() -> None:
    draft, one = parse_draft_config(EAGLE3).shape(POINTS[0].target, 3, "bfloat16"), setting("bfloat16")
    shared = rank_memory(draft, POINTS[0].target, one.model_copy(update={"context": 4}), (8000,))
    part = rank_memory(draft, POINTS[0].target, one, (2000,))
    assert shared.activations == part.activations + 8000 * 4 * (2 * 16) * 2
    assert shared.features == part.features
    assert shared.loss == part.loss


def test_what_ranks_divide_is_counted_once_among_them_and_gathered_on_each() -> None:
    draft = parse_draft_config(EAGLE3).shape(POINTS[0].target, 3, "bfloat16")
    one = setting("bfloat16")
    alone, shared = (
        rank_memory(draft, POINTS[0].target, how, (64,)) for how in (one, one.model_copy(update={"divided": 8}))
    )
    assert shared.optimizer == pytest.approx(alone.optimizer / 8, rel=1e-3)
    assert shared.weights == pytest.approx(alone.weights * 9 / 8, rel=1e-3)
    assert (shared.activations, shared.loss, shared.frozen_tables) == (
        alone.activations,
        alone.loss,
        alone.frozen_tables,
    )
    assert shared.total < alone.total
