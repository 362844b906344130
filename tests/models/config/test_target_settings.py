"""What a recipe leaves to the target: layers, sizes of the draft, longest prompt."""

import json
from pathlib import Path
from typing import Any

import pytest

from infra.refusal import Refusal
from models.config.draft import METHODS
from models.config.draft_base import LayerShape
from models.config.eagle3 import Eagle3Config
from models.config.medusa import MedusaConfig
from models.config.recipe import RunConfig, load_recipe, read_config
from models.config.target import TargetConfig
from models.config.target_settings import completed, read_shape

LLAMA = {
    "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 32, "vocab_size": 128_256,
    "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 896, "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip


@pytest.fixture
def recipe_for(tmp_path: Path):
    """Loads the recipe of three lines for a target with this `config.json`."""

    def load(config: dict[str, Any], *overrides: str) -> RunConfig:
        (tmp_path / "target").mkdir(exist_ok=True)
        (tmp_path / "target" / "config.json").write_text(json.dumps(config))
        recipe = tmp_path / "three.yaml"
        recipe.write_text(f"name: three\ntarget: {{name: {tmp_path / 'target'}}}\ndata: {{source: talk.jsonl}}\n")
        return load_recipe(recipe, list(overrides))

    return load


def eagle3(config: RunConfig) -> Eagle3Config:
    assert isinstance(config.draft, Eagle3Config)
    return config.draft


def test_three_lines_are_a_recipe(recipe_for) -> None:
    config = recipe_for(LLAMA)
    draft = eagle3(config)
    assert config.target.aux_layer_ids == (1, 15, 28)
    assert (draft.num_heads, draft.num_kv_heads, draft.head_dim, draft.intermediate_size) == (8, 2, 32, 896)
    assert (draft.rope_theta, draft.rms_norm_eps, draft.vocab_size) == (500_000.0, 1e-5, 32_000)
    assert draft.rope_scaling is not None
    assert draft.rope_scaling.parameters() == LLAMA["rope_scaling"]
    assert config.benchmark.prompt_tokens == 512
    assert not draft.fc_norm


def test_what_a_recipe_says_stays(recipe_for) -> None:
    config = recipe_for(
        LLAMA, "target.aux_layer_ids=[0, 3]", "draft.num_heads=4", "draft.fc_norm=true", "benchmark.prompt_tokens=9"
    )
    draft = eagle3(config)
    assert (config.target.aux_layer_ids, draft.num_heads, draft.fc_norm) == ((0, 3), 4, True)
    assert (draft.num_kv_heads, config.benchmark.prompt_tokens) == (2, 9)


@pytest.mark.parametrize("method", ["dflash", "medusa"])
def test_other_methods_need_no_sizes_either(recipe_for, method: str) -> None:
    config = recipe_for(LLAMA, f"draft.method={method}")
    assert config.draft.method == method
    assert config.draft.vocabulary_size(128_256) == (128_256 if method == "dflash" else 32_000)


SIZES = (
    "target.aux_layer_ids=[1]", "draft.num_heads=4", "draft.num_kv_heads=2", "draft.head_dim=8",
    "draft.intermediate_size=32",
)  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}


@pytest.mark.parametrize("method", ["eagle3", "dflash"])
def test_positions_are_the_targets_where_a_recipe_gives_all_sizes(recipe_for, tmp_path: Path, method: str) -> None:
    config = recipe_for(LLAMA | {"rope_theta": 1e6, "rope_scaling": YARN}, *SIZES, f"draft.method={method}")
    draft = config.draft
    assert isinstance(draft, LayerShape)
    assert (draft.num_heads, draft.rope_theta, draft.rms_norm_eps) == (4, 1e6, 1e-6)
    assert draft.rope_scaling is not None
    assert draft.rope_scaling.parameters().items() >= YARN.items()
    (tmp_path / "config.json").write_text(config.model_dump_json())
    (tmp_path / "target" / "config.json").unlink()
    assert read_config(tmp_path / "config.json") == config, "a resumed run keeps what it began with"


def test_positions_that_a_recipe_gives_are_its_own(recipe_for, tmp_path: Path) -> None:
    own = eagle3(recipe_for(LLAMA, *SIZES, "draft.rope_theta=500"))
    assert (own.rope_theta, own.rope_scaling) == (500, None)
    assert eagle3(recipe_for(LLAMA, *SIZES, "draft.rope_scaling=null")).rope_scaling is None
    axes = eagle3(recipe_for(LLAMA, *SIZES, "draft.mrope_section=[2, 1, 1]"))
    assert (axes.rope_theta, axes.rope_scaling) == (500_000.0, None)
    (tmp_path / "target" / "config.json").unlink()
    whole = [*SIZES, "draft.rope_theta=500"]
    assert eagle3(load_recipe(tmp_path / "three.yaml", whole)).rope_theta == 500, "the target is not read"


class HeadsConfig(MedusaConfig):
    """A method without decoder layers."""


class PlainLayersConfig(LayerShape):
    """A method of decoder layers and nothing else."""


def test_a_further_method_gets_the_settings_that_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "heads", HeadsConfig)
    monkeypatch.setitem(METHODS, "plain", PlainLayersConfig)
    (tmp_path / "config.json").write_text(json.dumps(TEXT | {"model_type": "gemma3_text", "rope_theta": 1e6}))
    tree = {"name": "x", "target": {"name": str(tmp_path)}}
    assert completed(tree | {"draft": {"method": "heads"}})["draft"] == {"method": "heads"}
    plain = completed(tree | {"draft": {"method": "plain", "head_dim": 8}})["draft"]
    assert plain == {
        "method": "plain", "num_heads": 8, "num_kv_heads": 2, "head_dim": 8, "intermediate_size": 896,
        "rms_norm_eps": 1e-5, "rope_theta": 1e6, "rope_scaling": None,
    }  # fmt: skip


def test_prompts_are_no_longer_than_samples_and_short_in_plain_text(recipe_for) -> None:
    assert recipe_for(LLAMA, "data.max_tokens=100").benchmark.prompt_tokens == 100
    assert recipe_for(LLAMA, "data.chat_template=none").benchmark.prompt_tokens == 64


TEXT = {key: value for key, value in LLAMA.items() if key not in ("rope_scaling", "rope_theta")}
ODD = {
    "multimodal": {"model_type": "gemma3", "text_config": TEXT | {"model_type": "gemma3_text", "head_dim": 64}},
    "positions by layer type": TEXT
    | {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
    "latent attention": TEXT | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_key_value_heads": 128},
    "experts alone": {key: value for key, value in TEXT.items() if key != "intermediate_size"},
    "few layers and tokens": TEXT | {"num_hidden_layers": 2, "vocab_size": 1000},
}


def test_families_that_say_it_otherwise(recipe_for) -> None:
    multimodal = eagle3(recipe_for(ODD["multimodal"]))
    assert (multimodal.head_dim, multimodal.fc_norm) == (64, True)
    assert eagle3(recipe_for(ODD["positions by layer type"])).rope_theta == 1e6
    latent = eagle3(recipe_for(ODD["latent attention"]))
    assert (latent.num_heads, latent.num_kv_heads, latent.head_dim) == (8, 8, 32)
    assert eagle3(recipe_for(ODD["experts alone"])).intermediate_size == 768
    few = recipe_for(ODD["few layers and tokens"])
    assert (few.target.aux_layer_ids, eagle3(few).vocab_size) == ((0, 1), None)


def test_gemma_3_leaves_out_what_equals_the_default(recipe_for, tmp_path: Path) -> None:
    """google/gemma-3-4b-it, as it is published."""
    text = {
        "model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "intermediate_size": 10240,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    draft = eagle3(recipe_for({"model_type": "gemma3", "text_config": text}))
    assert (draft.num_heads, draft.num_kv_heads, draft.head_dim, draft.rope_theta) == (8, 4, 256, 1e6)
    assert (draft.vocab_size, draft.fc_norm) == (32_000, True)
    target = TargetConfig(name=str(tmp_path / "target"), aux_layer_ids=(0,))
    assert read_shape(target).vocab_size == 262_208


def test_a_folders_modelopt_file_is_read_before_a_run(recipe_for, tmp_path: Path) -> None:
    """nvidia/Llama-3.1-8B-Instruct-FP8 has no quantization_config in its config.json."""
    target = recipe_for(LLAMA).target
    assert read_shape(target).bytes_per_weight is None
    modelopt = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (tmp_path / "target" / "hf_quant_config.json").write_text(json.dumps(modelopt))
    assert read_shape(target).bytes_per_weight == 1.0


@pytest.mark.parametrize(
    ("sizes", "heads"),
    [  # DeepSeek-V3, Kimi-K3, GLM-5, DeepSeek-V4-Flash, MiMo-V2-Flash, Qwen3.5-27B, gpt-oss, as they are published
        ({"hidden_size": 7168, "num_attention_heads": 128, "kv_lora_rank": 512, "v_head_dim": 128}, (64, 8, 128)),
        ({"hidden_size": 7168, "num_attention_heads": 96, "kv_lora_rank": 512, "v_head_dim": 128}, (64, 8, 128)),
        ({"hidden_size": 6144, "num_attention_heads": 64, "kv_lora_rank": 512, "head_dim": 64}, (48, 8, 128)),
        ({"hidden_size": 4096, "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512}, (32, 8, 128)),
        ({"hidden_size": 4096, "num_attention_heads": 64, "head_dim": 192, "v_head_dim": 128}, (32, 8, 128)),
        ({"hidden_size": 5120, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256}, (24, 4, 256)),
        ({"hidden_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64}, (64, 8, 64)),
    ],
)
def test_heads_that_engines_have_kernels_for(recipe_for, sizes: dict[str, int], heads: tuple[int, int, int]) -> None:
    text = {key: value for key, value in TEXT.items() if key not in ("num_key_value_heads", "head_dim")}
    draft = eagle3(recipe_for(text | {"intermediate_size": 30_000} | sizes))
    assert (draft.num_heads, draft.num_kv_heads, draft.head_dim) == heads


def test_a_single_experts_width_is_no_drafts(recipe_for) -> None:
    """gpt-oss and MiniMax-M2 name an expert's size."""
    assert eagle3(recipe_for(TEXT | {"hidden_size": 3072, "intermediate_size": 1536})).intermediate_size == 8192


MLA = {"q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16}


def test_latent_attention_like_the_targets(recipe_for) -> None:
    draft = eagle3(recipe_for(TEXT | MLA, "draft.mla={}"))
    assert draft.mla is not None
    assert draft.mla.model_dump() == MLA
    assert (draft.num_heads, draft.num_kv_heads, draft.head_dim) == (8, 8, 32)
    draft = eagle3(recipe_for(TEXT | MLA, "draft.mla={v_head_dim: 12}"))
    assert draft.mla is not None
    assert draft.mla.model_dump() == MLA | {"v_head_dim": 12}
    draft = eagle3(recipe_for(TEXT, "draft.mla={}"))
    assert draft.mla is not None
    assert (draft.mla.kv_lora_rank, draft.head_dim) == (512, 192)


def test_a_whole_recipe_reads_no_target(tmp_path: Path) -> None:
    recipe = tmp_path / "whole.yaml"
    recipe.write_text("name: whole\ntarget: {name: nowhere, aux_layer_ids: [1]}\ndraft: {method: medusa}\n")
    assert load_recipe(recipe).target.name == "nowhere"


def test_a_target_that_cannot_be_read_is_refused_with_the_remedy(recipe_for, tmp_path: Path) -> None:
    silent = {key: value for key, value in LLAMA.items() if key != "num_attention_heads"}
    with pytest.raises(Refusal, match=r"does not say 'num_attention_heads': set target\.aux_layer_ids and draft\.num_"):
        recipe_for(silent)
    package = "target={source: gguf-package, name: never-converted, aux_layer_ids: [1]}"
    with pytest.raises(Refusal, match=r"is not converted yet.*sizes and draft\.rope_theta, as recipes/quickstart"):
        recipe_for(LLAMA, package, *SIZES[1:])
    with pytest.raises(Refusal, match="neither a folder nor an id"):
        recipe_for(LLAMA, "target.name='no such/folder/anywhere'")
    (tmp_path / "target" / "config.json").unlink()
    with pytest.raises(Refusal, match="cannot be read"):
        load_recipe(tmp_path / "three.yaml")


@pytest.mark.parametrize("name", ["~/models/own", "/models/own", "./own", "../own"])
def test_a_path_is_no_id_of_the_hub(name: str) -> None:
    assert TargetConfig(name=name, aux_layer_ids=(0,)).hub_id is None
    assert TargetConfig(name="owner/own", aux_layer_ids=(0,)).hub_id == "owner/own"
