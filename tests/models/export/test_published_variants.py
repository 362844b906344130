"""Published drafts of many layouts start a training with the proposals, and the acceptance, that they had.

Loss and gradients of that training are the reference's too.
Files are written as their authors write them, with random weights, and run by a reference without any code of ours.
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_drafts import PlainDFlash, PlainEagle3, Tensors
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import normalize
from transformers import LlamaConfig, LlamaForCausalLM

from infra.files.run_folder import RunFolder
from infra.records.data_path import TargetRecord
from models.config.draft import parse_draft_config
from models.config.recipe import RunConfig
from models.drafts.base import PackedSamples, TargetProjection
from models.drafts.batched_proposer import Turn
from models.drafts.sampling import GREEDY
from models.export.published import import_start, load_published
from models.export.published_settings import read_published
from models.run import RunWithTarget
from models.targets.weights import read_target_head
from models.training.start import load_start

HIDDEN, VOCABULARY, SMALL, TARGET_LAYERS, LENGTH, STEPS = 24, 60, 32, 8, 22, 3
BOTH = {
    "method": "eagle3",
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "intermediate_size": 32,
    "ttt_steps": STEPS,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
METADATA = {
    "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.02, "torch_dtype": "float16",
    "transformers_version": "4.53.2", "use_cache": True, "pretraining_tp": 1, "max_window_layers": 36,
}  # fmt: skip
LLAMA = {
    "hidden_act": "silu", "hidden_size": HIDDEN, "intermediate_size": 40, "max_position_embeddings": 2048,
    "model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5, "vocab_size": VOCABULARY,
}  # fmt: skip
AUTHORS = METADATA | LLAMA | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": SMALL, "head_dim": 16}
FLASH = METADATA | LLAMA | {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "head_dim": 16, "num_hidden_layers": 2,
    "block_size": 4, "rope_theta": 1e6, "num_target_layers": TARGET_LAYERS, "auto_map": {"AutoModel": "dflash.Draft"},
    "attention_bias": False, "dtype": "bfloat16",
}  # fmt: skip


def by_speculators(method: str, layer: dict[str, Any], **settings: Any) -> dict[str, Any]:
    ids = "eagle_aux_hidden_state_layer_ids" if method == "eagle3" else "aux_hidden_state_layer_ids"
    norms = {"norm_before_residual": True, "norm_before_fc": False, "embed_requires_grad": False}
    return {
        "architectures": ["Eagle3DraftModel"], "auto_map": {"": "config.Eagle3SpeculatorConfig"}, "dtype": "bfloat16",
        "speculators_model_type": method, "speculators_version": "0.9.0", "draft_vocab_size": SMALL,
        "target_hidden_size": None, "tie_word_embeddings": False, ids: [2, 4, 6], "transformers_version": "5.23.0",
        "speculators_config": {"algorithm": method, "verifier": {"name_or_path": "target", "architectures": ["L"]}},
        "transformer_layer_config": METADATA | LLAMA | {"head_dim": 16, "mlp_bias": False} | layer,
        **(norms if method == "eagle3" else {"sample_from_anchor": False, "sliding_window_non_causal": False}),
    } | settings  # fmt: skip


def scaled(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **LLAMA3, **more}}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10_000.0}
FIVE = {"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}
MODELOPT = {"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False}
TWO, SLIDING = {"num_hidden_layers": 2}, ["sliding_attention"]
# lightseekorg/kimi-k2.5-eagle3-mla: a copy of the target's configuration, with its experts.
KIMI = METADATA | {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2", "hidden_act": "silu",
    "hidden_size": HIDDEN, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 4,
    "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "vocab_size": VOCABULARY, "draft_vocab_size": SMALL,
    "q_lora_rank": 12, "kv_lora_rank": 14, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 9,
    "rope_theta": 50_000.0, "attention_bias": False, "first_k_dense_replace": 1, "n_routed_experts": 384,
    "num_nextn_predict_layers": 0, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1,
    "rope_scaling": {
        "type": "yarn", "factor": 64.0, "original_max_position_embeddings": 16, "beta_fast": 1.0, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
MASKED = {"mask_token_id": 11, "target_layer_ids": [1, 3, 5]}
VARIANTS: dict[str, dict[str, Any]] = {
    # SafeAILab/EAGLE, eagle/traineagle3/config.json; the published ones are PyTorch files without embeddings.
    "EAGLE": METADATA
    | LLAMA
    | {"num_attention_heads": 3, "num_key_value_heads": 3}
    | {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": SMALL},
    # sgl-project/SpecForge, configs/qwen3-4b-eagle3.json.
    "SpecForge Qwen3": AUTHORS
    | {"rope_scaling": None, "rope_theta": 1e6, "sliding_window": None, "use_sliding_window": False}
    | {"tie_word_embeddings": True, "attention_bias": False},
    # configs/gemma3-27b-eagle3.json: a whole vocabulary, and a window that is switched off.
    "SpecForge Gemma 3": AUTHORS
    | {"draft_vocab_size": VOCABULARY, "sliding_window": 5, "use_sliding_window": False, "additional_fc": False}
    | {"reuse_target_lm_head": True, "target_model_type": "gemma3_text"}
    | {"eagle_config": FIVE},
    # configs/qwen3-30B-A3B-eagle3.1.json.
    "SpecForge EAGLE-3.1": AUTHORS | {"fc_norm": True, "norm_output": True, "rope_theta": 1e6},
    # SGLang's older names of the norms, and one norm before the fusion by `eagle_config`.
    "norms by their older names": AUTHORS | {"use_aux_norm": True},
    "ModelOpt": AUTHORS
    | {"rope_scaling": {"rope_type": "llama3"} | LLAMA3, "rope_theta": 500.0}
    | {"eagle_config": {"use_aux_hidden_state": True, "norm_before_fc": True} | FIVE}
    | {"use_last_layernorm": True, "num_aux_hidden_states": 3},
    "ModelOpt, the engine's layers": AUTHORS
    | {"eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": []} | MODELOPT},
    "YaRN": AUTHORS | {"rope_scaling": YARN | {"attn_factor": 1.0}},
    "linear RoPE, in two files": AUTHORS | {"rope_scaling": {"type": "linear", "factor": 4.0}},
    # configs/qwen3.5-35b-a3b-eagle3.json.
    "SpecForge, a setting of experts": AUTHORS | {"decoder_sparse_step": 1, "mlp_only_layers": []},
    "partial RoPE": AUTHORS | {"partial_rotary_factor": 0.5},
    "narrower than its target": AUTHORS | {"hidden_size": 16, "target_hidden_size": HIDDEN},
    "bias of the fusion": AUTHORS | {"bias": True},
    "two layers by SGLang's names": AUTHORS | TWO | {"fc_norm": True},
    "vLLM's Qwen3": AUTHORS | {"architectures": ["Eagle3Qwen3ForCausalLM"], "attention_bias": True},
    "speculators Llama 3": by_speculators("eagle3", scaled("llama3")),
    "speculators Qwen3, two layers": by_speculators("eagle3", {"model_type": "qwen3", "attention_bias": True} | TWO),
    "speculators sliding": by_speculators(
        "eagle3", {"layer_types": SLIDING, "sliding_window": 6, "use_sliding_window": True, "rope_parameters": YARN}
    ),
    # TorchSpec, configs/draft_models/kimi_k25_eagle3_mla.json.
    "MLA, Kimi-K2": KIMI | {"eagle_config": FIVE | MODELOPT},
    "MLA, EAGLE-3.1": KIMI | {"fc_norm": True, "norm_output": True, "rope_scaling": None},
    "MLA with direct queries, vLLM's numbers": KIMI
    | {"q_lora_rank": None, "eagle_aux_hidden_state_layer_ids": [1, 3, 6]}
    | {"architectures": ["Eagle3DeepseekV3ForCausalLM"], "rope_scaling": YARN},
    # z-lab/dflash, dflash/model.py and tests/fixtures/assistant-config.json.
    "DFlash": FLASH | {"dflash_config": MASKED},
    "DFlash, sliding": FLASH | MASKED | {"layer_types": SLIDING * 2, "sliding_window": 5},
    "DFlash, sliding and seeing ahead": FLASH
    | MASKED
    | {"layer_types": [*SLIDING, "full_attention"], "sliding_window": 5, "is_causal": False},
    "DFlash, mixed with biases": FLASH
    | {"dflash_config": MASKED, "attention_bias": True}
    | {"sliding_window": 5, "layer_types": [*SLIDING, "full_attention"]},
    "speculators DFlash, sliding and seeing ahead": by_speculators(
        "dflash", {"model_type": "qwen3", "layer_types": SLIDING * 2, "sliding_window": 4} | TWO,
        block_size=4, mask_token_id=11, sliding_window_non_causal=True,
    ),
    "speculators DFlash, pruned": by_speculators(
        "dflash", {"model_type": "qwen3"} | TWO | scaled("llama3"), block_size=4, mask_token_id=11
    ),
}  # fmt: skip


def projections(layer: dict[str, Any], prefix: str, wide: int, add: Callable[..., None], qk_norm: bool) -> None:
    hidden = layer["hidden_size"]
    (latent_heads if "kv_lora_rank" in layer else grouped_heads)(layer, prefix, wide, add)
    for name in ("q", "k") if qk_norm else ():
        add(f"{prefix}self_attn.{name}_norm.weight", layer["head_dim"])
    for name in ("gate", "up"):
        add(f"{prefix}mlp.{name}_proj.weight", layer["intermediate_size"], hidden)
    add(f"{prefix}mlp.down_proj.weight", hidden, layer["intermediate_size"])
    add(f"{prefix}post_attention_layernorm.weight", hidden)


def grouped_heads(layer: dict[str, Any], prefix: str, wide: int, add: Callable[..., None]) -> None:
    hidden, heads = layer["hidden_size"], layer["num_attention_heads"]
    size = layer.get("head_dim") or hidden // heads
    queries, keys = heads * size, layer["num_key_value_heads"] * size
    shapes = {"q": (queries, wide), "k": (keys, wide), "v": (keys, wide), "o": (hidden, queries)}
    for name, shape in shapes.items():
        add(f"{prefix}self_attn.{name}_proj.weight", *shape)
        if layer.get("attention_bias"):
            add(f"{prefix}self_attn.{name}_proj.bias", shape[0])


def latent_heads(layer: dict[str, Any], prefix: str, wide: int, add: Callable[..., None]) -> None:
    heads, rank, latent = layer["num_attention_heads"], layer["q_lora_rank"], layer["kv_lora_rank"]
    plain, rotary, value = (layer[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    queries = heads * (plain + rotary)
    shapes = {"q_proj": (queries, wide)}
    if rank is not None:
        shapes = {"q_a_proj": (rank, wide), "q_a_layernorm": (rank,), "q_b_proj": (queries, rank)}
    shapes |= {"kv_a_proj_with_mqa": (latent + rotary, wide), "kv_a_layernorm": (latent,)}
    shapes |= {"kv_b_proj": (heads * (plain + value), latent), "o_proj": (layer["hidden_size"], heads * value)}
    for name, shape in shapes.items():
        add(f"{prefix}self_attn.{name}.weight", *shape)


def weights(name: str, settings: dict[str, Any], head: Tensor) -> Tensors:
    """Random tensors, with the names of the layout."""
    torch.manual_seed(3)
    found: Tensors = {}

    def add(label: str, *shape: int) -> None:
        found[label] = torch.randn(shape) * 0.3 + float("norm" in label)

    layer = settings.get("transformer_layer_config", settings)
    hidden, size = layer["hidden_size"], settings.get("draft_vocab_size", VOCABULARY)
    add("fc.weight", hidden, 3 * HIDDEN)
    add("norm.weight", hidden)
    ids = torch.randperm(VOCABULARY)[:size].sort().values
    if size < VOCABULARY:
        found["d2t"] = ids - torch.arange(size)
        found["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, ids, True)
    if "DFlash" not in name:
        add("lm_head.weight", size, hidden)
        eagle3_layers(name, layer, add)
        eagle3_inputs(settings, hidden, add)
        return found
    add("hidden_norm.weight", hidden)
    for index in range(layer["num_hidden_layers"]):
        projections(layer, f"layers.{index}.", hidden, add, qk_norm=True)
        add(f"layers.{index}.input_layernorm.weight", hidden)
    return found if size == VOCABULARY else found | {"lm_head.weight": head[ids].clone()}


def eagle3_layers(name: str, layer: dict[str, Any], add: Callable[..., None]) -> None:
    hidden, qk_norm = layer["hidden_size"], "Qwen3" in name and "SpecForge" not in name
    first = "layers.0." if "speculators" in name or "SGLang" in name or "MLA" in name else "midlayer."
    for index in range(layer["num_hidden_layers"]):
        prefix = f"layers.{index}." if index else first
        projections(layer, prefix, hidden if index else 2 * hidden, add, qk_norm)
        add(f"{prefix}{'hidden_norm' if index and 'SGLang' in name else 'input_layernorm'}.weight", hidden)
        if not index:
            add(f"{prefix}hidden_norm.weight", hidden)


def eagle3_inputs(settings: dict[str, Any], hidden: int, add: Callable[..., None]) -> None:
    if settings.get("bias"):
        add("fc.bias", hidden)
    named = [f"fc_norm.{index}" for index in range(3)] if settings.get("fc_norm") else []
    named += [f"aux_norm_{label}" for label in ("low", "mid", "high")] if settings.get("use_aux_norm") else []
    for label in named:
        add(f"{label}.weight", HIDDEN)
    if (settings.get("eagle_config") or {}).get("norm_before_fc"):
        add("input_norm.weight", 3 * HIDDEN)
    if hidden != HIDDEN:
        add("embed_tokens.weight", VOCABULARY, hidden)


def publish(name: str, folder: Path, settings: dict[str, Any], tensors: Tensors) -> None:
    """As PyTorch's files for EAGLE, several for one variant, as safetensors for the others."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    if name == "EAGLE":
        torch.save(tensors, folder / "pytorch_model.bin")
    elif "two files" in name:
        labels = sorted(tensors)
        files = {label: f"pytorch_model-0000{1 + (place % 2)}-of-00002.bin" for place, label in enumerate(labels)}
        for file in set(files.values()):
            torch.save({label: tensors[label] for label in labels if files[label] == file}, folder / file)
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    else:
        prefix = "model." if name == "vLLM's Qwen3" else ""
        save_file({f"{prefix}{label}": tensor for label, tensor in tensors.items()}, folder / "model.safetensors")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TargetRecord:
    """Rows of its head are of equal length: each token is the greatest along its own row."""
    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(1)
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32}
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=TARGET_LAYERS, **sizes)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.copy_(5 * normalize(torch.randn(VOCABULARY, HIDDEN)))
        model.model.embed_tokens.weight.normal_()
    model.save_pretrained(folder)
    return TargetRecord(
        name="target", path=str(folder), revision="r", model_type="llama", hidden_size=HIDDEN,
        num_layers=TARGET_LAYERS, vocab_size=VOCABULARY, licence="none",
    )  # fmt: skip


def text_of(plain: Any, aux: Tensor, ids: Tensor) -> list[int]:
    """A text that mostly is what the draft proposes."""
    text = ids[torch.randint(len(ids), (LENGTH + 1,))].tolist()
    for row in range(0, LENGTH - STEPS - 1, STEPS + 1):
        text[row + 2 : row + 2 + STEPS] = plain.propose(text[: row + 2], aux[: row + 1], STEPS)
    return text


@pytest.mark.parametrize("name", VARIANTS)
def test_it_starts_with_the_proposals_and_the_acceptance_that_it_had(name: str, target: TargetRecord, tmp_path: Path):
    settings, head = VARIANTS[name], read_target_head(Path(target.path), torch.float32)
    tensors = weights(name, settings, head.head)
    publish(name, tmp_path / "published", settings, tensors)
    plain = (PlainDFlash if "DFlash" in name else PlainEagle3)(settings, tensors, head.embedding, head.head)
    aux = torch.randn(LENGTH, 3 * HIDDEN)
    text = text_of(plain, aux, plain.ids)
    proposed = [plain.propose(text[: row + 2], aux[: row + 1], STEPS) for row in range(LENGTH)]
    draft = started(target, tmp_path)
    assert draft.rollout(torch.tensor(text), aux, STEPS).tolist() == proposed
    proposer, seen = draft.proposers(1), 0
    for row in (0, 5, 6, 14, LENGTH - 1):
        tree = proposer.propose({0: Turn(text[: row + 2], aux[seen : row + 1], STEPS, GREEDY)})[0]
        assert tree.proposals.tokens.tolist() == proposed[row]
        seen = row + 1
    counts = acceptance(proposed, text)
    assert 0 < counts[0][-1] < counts[1][0]
    last = 4 * head.head[torch.tensor(text).roll(-1)][:LENGTH]
    projection = TargetProjection(head.head[draft.vocabulary.target_ids], None, 1.0, None)
    everywhere = torch.ones(LENGTH, dtype=torch.bool)
    sample = PackedSamples(torch.tensor(text)[:LENGTH], everywhere, aux, last, (LENGTH,))
    outcome = draft.loss(sample, projection, LENGTH, 16)
    assert (outcome.accepted.tolist(), outcome.tried.tolist()) == counts
    outcome.loss.backward()
    expected = plain_gradients(plain, tensors, (text, aux, last, projection.rows), step_weights(draft))
    assert outcome.loss.item() == pytest.approx(expected.pop("loss").item(), rel=1e-5)
    found = {name: parameter.grad for name, parameter in draft.named_parameters()}
    assert expected.keys() == found.keys()
    for label, gradient in found.items():
        assert (gradient - expected[label]).norm() <= 1e-4 * gradient.norm(), label


def step_weights(draft: Any) -> list[float]:
    config = draft.config
    return (
        [math.exp(-k / config.decay_gamma) for k in range(STEPS)] if config.method == "dflash" else config.step_weights
    )


def plain_gradients(plain: Any, tensors: Tensors, sample: tuple, weights: Sequence[float]) -> Tensors:
    """The reference's loss, and its gradients by our names."""
    trained = {label: x for label, x in tensors.items() if x.is_floating_point() and x is not plain.fixed}
    for x in trained.values():
        x.requires_grad_()
    loss = plain.loss(*sample, weights) / LENGTH
    gradients = torch.autograd.grad(loss, list(trained.values()))
    older = {
        "midlayer.": "layers.0.",
        "aux_norm_low": "fc_norm.0",
        "aux_norm_mid": "fc_norm.1",
        "aux_norm_high": "fc_norm.2",
    }
    older |= {"layers.1.hidden_norm": "layers.1.input_layernorm"}
    found = {"loss": loss.detach()}
    for label, gradient in zip(trained, gradients, strict=True):
        ours = label
        for theirs, name in older.items():
            ours = ours.replace(theirs, name)
        found[ours] = gradient
    return found


def acceptance(proposed: list[list[int]], text: list[int]) -> tuple[list[int], list[int]]:
    """Accepted and tried proposals by position, after every row of the text's first `LENGTH` tokens."""
    accepted, tried = [0] * STEPS, [0] * STEPS
    for row in range(LENGTH - 1):
        for step, (proposal, said) in enumerate(zip(proposed[row], text[row + 2 : LENGTH], strict=False)):
            tried[step] += 1
            if proposal != said:
                break
            accepted[step] += 1
    return accepted, tried


def started(target: TargetRecord, folder: Path) -> Any:
    """The draft that a run starts training with, whose recipe has the published draft's settings."""
    method = "dflash" if "dflash" in (folder / "published" / "config.json").read_text().lower() else "eagle3"
    knobs = {key: value for key, value in BOTH.items() if key != "ttt_steps" or method == "eagle3"} | {"method": method}
    found = load_published(folder / "published", parse_draft_config(knobs), target)
    recipe = {"name": "r", "target": {"name": target.path, "aux_layer_ids": list(found.aux_layer_ids)}}
    recipe |= {"draft": found.config.model_dump(), "training": {"start_from": str(folder / "published")}}
    run = RunFolder(folder / "run")
    run.path.mkdir()
    config = RunConfig.model_validate(recipe)
    import_start(str(folder / "published"), config, target, run.start)
    return load_start(RunWithTarget(run, config, target))


def test_positions_along_three_axes_have_an_older_name() -> None:
    """SpecForge, configs/qwen2.5-vl-32b-eagle3.json."""
    found = read_published(AUTHORS | {"rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}})
    assert (found.shape["mrope_section"], found.shape.get("rope_scaling")) == ([4, 2, 2], None)
