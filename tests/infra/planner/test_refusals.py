"""What cannot run is refused with a recipe that can."""

from pathlib import Path

import pytest

from infra.planner.memory import FRAGMENTS, RESERVED
from infra.planner.refusals import refusals
from models.config.recipe import load_recipe
from tasks.plan import plan_recipe

RECIPE = Path(__file__).parents[3] / "recipes" / "qwen3-8b.yaml"


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        (["plan.memory_gb=24"], "training.micro_batches"),
        (["training.micro_batches=8", "data.max_tokens=800000"], "data.max_tokens"),
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
