"""A run's own configuration: read back, or refused with the file's name and a remedy."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from infra.files.atomic import write_atomically
from infra.pools.base import PoolSpec
from infra.pools.run_pools import generator_spec, pool_specs
from infra.refusal import Refusal
from models.config.recipe import RunConfig, as_recipe, load_recipe, read_config

TINY = Path(__file__).parents[3] / "recipes" / "tiny.yaml"


@pytest.mark.parametrize(
    "damage",
    [lambda data: b"", lambda data: data[: len(data) // 2], lambda data: bytes(len(data)), lambda data: b"\xff" + data],
    ids=["empty", "torn", "zeroed", "not text"],
)
def test_a_damaged_configuration_is_refused(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    file = tmp_path / "config.json"
    write_atomically(file, load_recipe(TINY))
    assert read_config(file).name == "tiny"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(Refusal, match=r"config\.json is damaged: .*backup"):
        read_config(file)


def test_a_run_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    recipe = load_recipe(TINY)
    tree = recipe.model_dump(mode="json")
    tree["benchmark"]["sampled_reference_tokens"] = 128
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tree))
    assert read_config(path) == recipe


def test_the_form_s_fields_keep_their_order() -> None:
    """PostgreSQL forgets the order of keys, and Prefect's form sorts by `position`."""
    definitions = RunConfig.model_json_schema()["$defs"]
    for name in ("TrainingConfig", "DataConfig", "SGLangConfig", "Eagle3Config"):
        assert [field["position"] for field in definitions[name]["properties"].values()] == list(
            range(len(definitions[name]["properties"]))
        )


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ([], "float32"),
        (["generator.compute_dtype=bfloat16"], "float32"),
        (["generator.compute_dtype=bfloat16", "pools.inference_gpus=1", "benchmark.compute_dtype=null"], "bfloat16"),
        (["benchmark.compute_dtype=bfloat16"], "bfloat16"),
        (["benchmark.compute_dtype=float32", "generator.compute_dtype=bfloat16", "pools.inference_gpus=1"], "float32"),
    ],
)
def test_on_gpus_the_benchmark_computes_as_the_generator_does(settings: list[str], dtype: str) -> None:
    assert load_recipe(TINY, settings).benchmark_dtype == dtype


def test_a_cpu_computes_in_float32_unless_told_otherwise() -> None:
    """Without AVX-512's bfloat16 a CPU takes five times as long in it."""
    bare = {"name": "x", "target": {"name": "t", "aux_layer_ids": [0]}, "draft": {"method": "medusa"}}
    for more, dtypes in (
        ({}, ("float32", "float32")),
        ({"pools": {"inference_gpus": 1}}, ("bfloat16", "float32")),
        ({"pools": {"inference_gpus": 1, "training_gpus": 1}}, ("bfloat16", "bfloat16")),
        ({"generator": {"compute_dtype": "bfloat16"}, "training": {"precision": "bfloat16"}}, ("bfloat16", "bfloat16")),
    ):
        config = RunConfig.model_validate(bare | more)
        assert (config.capture_dtype, config.training_dtype) == dtypes


def test_float32_is_refused_for_sglang_on_gpus_unless_a_backend_takes_it() -> None:
    on_gpu = ["generator.engine=sglang", "pools.inference_gpus=1"]
    half = ["generator.compute_dtype=bfloat16", "benchmark.compute_dtype=float32"]
    with pytest.raises(Refusal, match=r"generator\.compute_dtype=float32: .*set bfloat16, or generator\.sglang"):
        load_recipe(TINY, on_gpu)
    with pytest.raises(Refusal, match=r"benchmark\.compute_dtype=float32: .*set bfloat16, or generator\.sglang"):
        load_recipe(TINY, [*on_gpu, *half])
    load_recipe(TINY, [*on_gpu, *half, "benchmark.served_concurrency=[]"])
    load_recipe(TINY, [*on_gpu, "generator.sglang.attention_backend=torch_native"])
    load_recipe(TINY, ["generator.engine=sglang"])


LAYER = "num_heads: 6, num_kv_heads: 3, head_dim: 32, intermediate_size: 64"


@pytest.mark.parametrize(
    ("draft", "most"),
    [
        ("method: dflash", 17), ("method: dflash, sample_from_anchor: true", 16), ("method: dflash2", 17),
        ("method: domino", 17), ("method: dspark", 16),
    ],
)  # fmt: skip
def test_a_block_proposes_no_more_than_is_measured(draft: str, most: int) -> None:
    def load(size: int) -> RunConfig:
        return load_recipe(TINY, [f"draft={{{draft}, {LAYER}, block_size: {size}}}"])

    assert load(most).benchmark.lookahead == 16
    with pytest.raises(Refusal, match=r"draft(\.|: draft\.)block_size") as refused:
        load(most + 1)
    assert "benchmark.lookahead:" not in str(refused.value)


def test_recomputing_is_refused_where_nothing_is_recomputed() -> None:
    for draft in (f"{{method: dflash, {LAYER}}}", "{method: medusa}"):
        with pytest.raises(Refusal, match=r"training\.recompute: drafts of .* leave it out"):
            load_recipe(TINY, [f"draft={draft}", "training.recompute=true"])
    load_recipe(TINY, ["training.recompute=true"])
    mtp = [f"draft={{method: mtp, family: mimo, {LAYER}}}", "target.aux_layer_ids=[]"]
    load_recipe(TINY, [*mtp, "training.recompute=true"])


def test_the_gate_s_loads_are_timed_ones() -> None:
    loads = "promotion.traffic.loads=[1, 8]"
    with pytest.raises(Refusal, match=r"promotion\.traffic\.loads \[8\] must be among benchmark\.loads \[1, 4, 16\]"):
        load_recipe(TINY, [loads])
    config = load_recipe(TINY, [loads, "benchmark.loads=[1, 8]"])
    assert config.promotion.traffic.loads_of(config.benchmark) == (1, 8)
    main = load_recipe(TINY, ["promotion.traffic.loads=null"])
    assert main.promotion.traffic.loads_of(main.benchmark) == (1,)


def test_machines_of_the_trainer_share_the_ranks_evenly_and_are_of_a_cluster() -> None:
    cluster = ["pools.kind=slurm", "transport.kind=mooncake", "pools.training_machines=2"]
    assert load_recipe(TINY, [*cluster, "training.ranks=4"]).pools.training_machines == 2
    with pytest.raises(Refusal, match=r"training\.ranks is 3, and pools\.training_machines=2"):
        load_recipe(TINY, [*cluster, "training.ranks=3"])
    with pytest.raises(Refusal, match=r"pools\.training_machines is 2, and pools\.kind=local is one"):
        load_recipe(TINY, ["pools.training_machines=2", "training.ranks=2"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["pools.kind=local"], r"pools\.machines_per_generator is 2, and pools\.kind=local is one"),
        (["generator.engine=transformers"], r"generator\.engine=transformers uses one: set it to sglang"),
        (["generator.sglang.data_parallel=2"], r"data_parallel=2 are whole copies: set it to 1"),
        (["pools.inference_gpus=18", "generator.count=2"], "make it a multiple of 4"),
        (["generator.sglang.tensor_parallel=3"], "tensor_parallel=3 ranks are dealt out evenly"),
        (
            ["generator.sglang.attention_data_parallel=3"],
            "attention_data_parallel is 3, and a copy of the target has 16",
        ),
        (["generator.sglang.expert_parallel=5"], "expert_parallel is 5, and a copy of the target has 16 ranks"),
        (["pools.inference_gpus=0"], r"generator\.sglang\.tensor_parallel has to say how many ranks"),
    ],
)
def test_machines_of_a_generator(overrides: list[str], message: str) -> None:
    cluster = ["pools.kind=ray", "transport.kind=mooncake", "generator.engine=sglang", "pools.machines_per_generator=2"]
    cluster += ["pools.inference_gpus=16", "generator.compute_dtype=bfloat16", "benchmark.compute_dtype=bfloat16"]
    config = load_recipe(TINY, cluster)
    assert config.gpus_per_copy == 16
    assert [spec.parts for spec in pool_specs(config.pools, 3)] == [6, 1]
    assert generator_spec(config.pools, 2) == PoolSpec("inference", 8, parts=2)
    with pytest.raises(Refusal, match=message):
        load_recipe(TINY, [*cluster, *overrides])


@pytest.mark.parametrize(
    ("gpus", "overrides", "message"),
    [
        (5, ["generator.count=2"], "inference_gpus=5, .*count=2: .*make inference_gpus 2, 4 or another multiple"),
        (1, ["generator.count=4"], None),  # which share it
        (3, ["generator.count=2", "generator.sglang.tensor_parallel=1"], None),
        (3, ["generator={count: 2, sglang: {tensor_parallel: 1, data_parallel: 2}}"], "wants 2 GPUs .* has 1 GPU "),
        (4, ["generator={count: 4, sglang: {tensor_parallel: 2}}"], r"wants 2 GPUs .* 1 times .* 2\), .* has 1 GPU "),
        (4, ["generator={count: 4, sglang: {data_parallel: 2}}"], r"wants 2 GPUs .* 2 times .* 1\), .* has 1 GPU "),
        (8, ["generator.sglang={data_parallel: 2, tensor_parallel: 8}"], "wants 16 GPUs .* has 8 GPUs "),
        (8, ["generator.sglang={data_parallel: 2, tensor_parallel: 2}", "generator.count=2"], None),
        (0, ["generator.count=4", "generator.sglang.tensor_parallel=2"], None),
    ],
)
def test_a_generator_is_given_what_its_server_is_started_with(
    gpus: int, overrides: list[str], message: str | None
) -> None:
    half = ["generator.engine=sglang", "generator.compute_dtype=bfloat16", "benchmark.compute_dtype=bfloat16"]
    with pytest.raises(Refusal, match=message) if message else nullcontext():
        load_recipe(TINY, [f"pools.inference_gpus={gpus}", *overrides, *half])


def test_what_the_target_generates_keeps_its_reasoning() -> None:
    settings = ["data.chat_template=tokenizer", "data.overlong=truncate", "data.regeneration={}"]
    with pytest.raises(Refusal, match=r"data\.thinking=strip would change what the target generated .*set it to mask"):
        load_recipe(TINY, [*settings, "data.thinking=strip"])
    assert load_recipe(TINY, [*settings, "data.thinking=mask"]).data.regeneration is not None


@pytest.mark.parametrize("sections", [{}, {"draft": {"method": "dflash"}}, {"draft": {"method": "mtp"}}])
def test_what_a_valid_target_fills_in_is_not_asked_for(sections: dict[str, dict[str, str]]) -> None:
    target, data = {"source": "/models/m", "name": "m"}, {"source": "a.jsonl"}
    with pytest.raises(Refusal) as caught:
        as_recipe({"name": "x", "target": target, "data": data} | sections, "it")
    assert str(caught.value) == (
        "it is not valid; correct these settings:\n"
        "  target.source: Input should be 'huggingface', 'gguf-package' or 'tiny' (got '/models/m')"
    )
