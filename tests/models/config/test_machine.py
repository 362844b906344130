"""How many ranks a recipe has, and in which data type it computes, where it is silent."""

from pathlib import Path

import pytest

from infra.refusal import Refusal
from models.config.machine import multiplies_bfloat16, with_fast_arithmetic
from models.config.recipe import as_recipe, read_config

BARE = {"name": "x", "target": {"name": "t", "aux_layer_ids": [0]}, "draft": {"method": "medusa"}}


def cpuinfo(folder: Path, vendor: str, flags: str) -> Path:
    file = folder / f"{vendor}-{flags.replace(' ', '-')}"
    of_each = "".join(f"processor\t: {n}\nvendor_id\t: {vendor}\nflags\t\t: fpu {flags}\n\n" for n in (0, 1))
    file.write_text(of_each)
    return file


@pytest.fixture
def amx(tmp_path: Path) -> Path:
    return cpuinfo(tmp_path, "GenuineIntel", "avx512_bf16 amx_bf16 amx_tile")


@pytest.fixture
def other(tmp_path: Path) -> Path:
    return cpuinfo(tmp_path, "GenuineIntel", "avx512_bf16")


def test_which_processors_are_fast_in_bfloat16(amx: Path, other: Path, tmp_path: Path) -> None:
    assert multiplies_bfloat16(amx)
    assert not multiplies_bfloat16(other), "measured: slower than in float32"
    assert multiplies_bfloat16(cpuinfo(tmp_path, "AuthenticAMD", "avx512_bf16"))
    assert not multiplies_bfloat16(cpuinfo(tmp_path, "AuthenticAMD", "avx2"))
    assert not multiplies_bfloat16(tmp_path / "macos")
    arm = tmp_path / "arm"
    arm.write_text("processor\t: 0\nFeatures\t: fp asimd bf16\n")
    assert not multiplies_bfloat16(arm)


def test_a_silent_recipe_computes_in_bfloat16_on_such_a_processor(amx: Path, other: Path) -> None:
    config = as_recipe(with_fast_arithmetic(BARE, amx), "here")
    assert {config.capture_dtype, config.training_dtype, config.benchmark_dtype} == {"bfloat16"}
    assert with_fast_arithmetic(BARE, other) == BARE
    assert "generator" not in BARE


def test_what_a_recipe_says_and_what_gpus_decide_stays(amx: Path) -> None:
    own = BARE | {
        "generator": {"compute_dtype": "float32", "count": 2},
        "training": {"precision": "float32"},
        "benchmark": {"compute_dtype": "float32"},
    }
    assert with_fast_arithmetic(own, amx) == own
    for pools in ({"inference_gpus": 1, "training_gpus": 1}, "nonsense"):
        assert with_fast_arithmetic(BARE | {"pools": pools}, amx) == BARE | {"pools": pools}
    one = with_fast_arithmetic(BARE | {"pools": {"training_gpus": 1}}, amx)
    assert (one["generator"], "training" in one) == ({"compute_dtype": "bfloat16"}, False)
    assert with_fast_arithmetic(BARE | {"training": [1]}, amx)["training"] == [1], "validation says what is wrong"


def test_a_run_keeps_the_data_type_that_it_began_with(amx: Path, tmp_path: Path) -> None:
    begun = as_recipe(with_fast_arithmetic(BARE, amx), "here")
    (tmp_path / "config.json").write_text(begun.model_dump_json())
    assert read_config(tmp_path / "config.json") == begun


def test_a_silent_recipe_has_a_rank_for_each_gpu() -> None:
    silent = BARE | {"pools": {"inference_gpus": 4, "training_gpus": 4}}
    for given, engine, count in (
        ({}, "sglang", 1),
        ({"engine": "transformers"}, "transformers", 4),
        ({"engine": "transformers", "count": 2}, "transformers", 2),
        ({"count": 4}, "sglang", 4),
    ):
        generator = as_recipe(silent | {"generator": given}, "a recipe").generator
        assert (generator.engine, generator.count) == (engine, count)
    assert as_recipe(BARE, "a recipe").generator.engine == "transformers"
    assert as_recipe(silent, "a recipe").training.ranks == 4
    assert as_recipe(BARE, "a recipe").training.ranks == 1
    with pytest.raises(Refusal, match="a rank needs one GPU"):
        as_recipe(silent | {"training": {"ranks": 2}}, "a recipe")
