"""What cannot run is refused with a recipe that can."""

import math
from pathlib import Path

import pytest

from infra.planner.memory import FRAGMENTS, RESERVED, engine_static
from infra.planner.plan import make_plan
from infra.planner.refusals import HOST_SHARE, PlanObstacle, refusals
from models.config.recipe import load_recipe
from tasks.plan import plan_recipe

RECIPE = Path(__file__).parents[3] / "recipes" / "qwen3-8b.yaml"


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        (["plan.memory_gb=24", "generator.sglang.memory_fraction=0.9"], "training.micro_batches"),
        (["training.micro_batches=8", "data.max_tokens=800000", "generator.count=2"], "data.max_tokens"),
        (["training.micro_batches=8", "data.max_tokens=150000"], "training.recompute"),
        (["transport.budget_mib=512"], "transport.budget_mib"),
        (["plan.memory_gb=18", "data.max_tokens=64"], "pools.inference_gpus"),
    ],
)
def test_the_nearest_recipe_is_possible(settings: list[str], setting: str) -> None:
    settings = [*settings, "transport.budget_mib=10000000"] if setting != "transport.budget_mib" else settings
    found = refusals(plan_recipe(load_recipe(RECIPE, settings)))
    assert [refusal for refusal in found if any(change.startswith(setting) for change in refusal.overrides)], found
    overrides = [change for refusal in found for change in refusal.overrides]
    assert not refusals(plan_recipe(load_recipe(RECIPE, [*settings, *overrides])))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (["plan.memory_gb=80", "plan.target.parameters=600000000000"], "the target's weights take 1118 GiB"),
        (
            ["pools.inference_gpus=16", "pools.training_gpus=4"],
            "a generator's copy of the target is divided among 16 GPUs, and 1 machine of 8",
        ),
    ],
)
def test_a_target_that_is_too_large_for_a_machine_is_divided_among_several(settings: list[str], problem: str) -> None:
    settings = ["generator.count=1", *settings]
    (refusal,) = refusals(plan_recipe(load_recipe(RECIPE, settings)))
    assert problem in str(refusal)
    assert any(one.startswith("pools.machines_per_generator=") for one in refusal.overrides)
    assert not refusals(plan_recipe(load_recipe(RECIPE, [*settings, *refusal.overrides])))


@pytest.mark.parametrize(
    ("memory_mib", "ranks", "share"), [(24_564, 1, 0.724), (81_559, 2, 0.84), (183_359, 4, 0.86), (143_771, 1, 0.91)]
)
def test_sglang_s_own_share_of_a_gpu(memory_mib: int, ranks: int, share: float) -> None:
    """RTX 4090, H100, B200 and H200, as SGLang 0.5.23 works it out."""
    memory_bytes = memory_mib * 2**20
    assert engine_static(memory_bytes, ranks) / memory_bytes == pytest.approx(share, rel=0.01)
    shares = [engine_static(memory_bytes, count) for count in (1, 2, 4, 8)]
    assert shares == sorted(shares, reverse=True)
    assert engine_static(memory_bytes, ranks, 32_768) < engine_static(memory_bytes, ranks, 2048) < memory_bytes
    assert engine_static(2**30, ranks) == 0


LLAMA_70B = [
    *("plan.target.parameters=70553706496", "plan.target.num_layers=80", "plan.target.hidden_size=8192"),
    *("plan.target.cache_width=2048", "plan.target.attention_width=8192", "plan.target.vocab_size=128256"),
    *("generator.count=1", "data.max_tokens=2048", "training.micro_batches=8", "plan.memory_gb=85.52"),
]


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ([], "pools.inference_gpus=4"),
        (["generator.sglang.memory_fraction=0.9"], ""),
        (["pools.inference_gpus=4"], ""),
        (["pools.inference_gpus=4", "generator.sglang.memory_fraction=0.4"], "generator.sglang.memory_fraction=0.9"),
        (["pools.inference_gpus=4", "data.max_tokens=1000000"], "pools.inference_gpus=8"),
        (["generator.sglang.quantization=fp8"], ""),  # SGLang takes its share once the weights are quantized
    ],
)
def test_a_target_has_to_leave_room_for_its_cache_in_sglang(settings: list[str], remedy: str) -> None:
    """Llama-3.1-70B on two H100s has weights of 66 GiB each, and SGLang's own share is as much."""
    plan = plan_recipe(load_recipe(RECIPE, [*LLAMA_70B, "pools.inference_gpus=2", "plan.gpus=16", *settings]))
    found = [str(one) for one in refusals(plan) if "the target's weights" in str(one)]
    assert len(found) == bool(remedy), found
    assert all(remedy in one and "the KV cache" in one for one in found)


def test_smaller_chunks_of_the_loss_are_tried_before_shorter_samples() -> None:
    short = ["training.micro_batches=16", "data.max_tokens=4096", "training.loss_chunk_tokens=4096"]
    wanted = plan_recipe(load_recipe(RECIPE, [*short, "training.loss_chunk_tokens=2048"])).memory.total
    room = (wanted / FRAGMENTS + RESERVED) / 1e9 + 0.01
    settings = [*short, f"plan.memory_gb={room}", "plan.target.parameters=1"]
    (refusal,) = refusals(plan_recipe(load_recipe(RECIPE, settings)))
    assert refusal.overrides == ("training.loss_chunk_tokens=2048",)


def test_a_draft_that_fits_nowhere() -> None:
    (target, trainer) = refusals(plan_recipe(load_recipe(RECIPE, ["plan.memory_gb=6"])))
    assert "the target's weights take 15 GiB in bfloat16" in str(target)
    assert not trainer.overrides
    assert "a smaller draft.vocab_size or draft" in str(trainer)


def test_what_is_possible_is_not_refused() -> None:
    assert not refusals(plan_recipe(load_recipe(RECIPE)))


def test_a_host_without_room_for_arriving_samples() -> None:
    """Pinned tensors take powers of two; fewer steps are fetched ahead where that is enough."""
    plan = plan_recipe(load_recipe(RECIPE, ["training.prefetch_steps=4", "transport.budget_mib=100000"]))
    job, row = plan.job, 4096 * 2
    powers = [2 ** math.ceil(math.log2(sum(job.micro_batch) * parts * row)) for parts in (3, 1)]
    assert job.pinned_bytes == (4 + 2) * job.micro_batches * sum(powers)
    whole = job.pinned_bytes * job.ranks + plan.store_bytes

    def refused(host_bytes: float) -> list[PlanObstacle]:
        return list(refusals(make_plan(job.model_copy(update={"host_bytes": int(host_bytes)}))))

    assert not refused(0), "of unknown size"
    assert not refused(whole / HOST_SHARE + 2)
    (fewer,) = refused((whole - 1) / HOST_SHARE)
    assert fewer.overrides == ("training.prefetch_steps=3",)
    assert "GiB of it pinned by the trainer ranks" in str(fewer)
    (nothing,) = refused(2**30)
    assert not nothing.overrides
    assert "a smaller training.samples_per_step or data.max_tokens" in str(nothing)


def test_samples_that_arrive_elsewhere_take_no_memory_of_the_host() -> None:
    assert plan_recipe(load_recipe(RECIPE.with_name("tiny.yaml"))).job.pinned_bytes == 0
    job = plan_recipe(load_recipe(RECIPE)).job
    on_device = job.model_copy(update={"setting": job.setting.model_copy(update={"on_device": True})})
    assert job.pinned_bytes > on_device.pinned_bytes == 0


SHARED = ["generator.engine=sglang", "plan.memory_gb=300", "data.max_samples=64"]


@pytest.mark.parametrize(
    ("generators", "inference", "training", "copy", "refused"),
    [
        (1, 2, 1, None, "1 of the 2 GPUs"),
        (1, 8, 7, None, "7 of the 8 GPUs"),
        (2, 4, 3, None, "1 of the 2 GPUs"),
        (1, 4, 3, 2, "1 of the 2 GPUs"),
        (2, 4, 2, None, ""),
        (1, 4, 2, 2, ""),
        (1, 2, 2, None, ""),
        (1, 1, 2, None, ""),
    ],
)
def test_a_copy_of_the_target_is_not_shared_in_part(
    generators: int, inference: int, training: int, copy: int | None, refused: str
) -> None:
    """SGLang refuses tensor parallelism on GPUs whose free memory differs by a tenth."""
    settings = [f"generator.count={generators}", f"pools.inference_gpus={inference}", f"pools.training_gpus={training}"]
    settings += [f"training.ranks={training}", f"plan.gpus={max(inference, training)}", *SHARED]
    if copy:
        settings += [f"generator.sglang.tensor_parallel={copy}", f"generator.sglang.data_parallel={inference // copy}"]
    auto = plan_recipe(load_recipe(RECIPE, settings)).job
    assert auto.sharing == ("alternate" if refused else "share"), auto.sharing_why
    assert refused in auto.sharing_why
    found = refusals(plan_recipe(load_recipe(RECIPE, [*settings, "pools.sharing=share"])))
    assert [one.overrides for one in found] == ([("pools.sharing=alternate",)] if refused else [])
    assert all(refused in one.problem for one in found)


def test_one_memory_holds_gpus_and_samples_once() -> None:
    """As in a DGX Spark, whose GPU has the machine's memory."""
    job = plan_recipe(load_recipe(RECIPE)).job
    parted, unified = (job.model_copy(update={"host_bytes": job.memory_bytes, "unified": one}) for one in (False, True))
    assert unified.host_needs > 0
    assert unified.rank_bytes == parted.rank_bytes - unified.host_needs
    full = unified.model_copy(update={"memory_bytes": make_plan(job).memory.total + unified.host_needs})
    (obstacle,) = (one for one in refusals(make_plan(full)) if "a trainer rank would need" in one.problem)
    assert "of the same memory" in obstacle.problem
    assert obstacle.overrides == ("training.prefetch_steps=1",)
