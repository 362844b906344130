"""What is refused before any pool is taken."""

from pathlib import Path

import pytest

from infra.records.data_path import SamplesRecord, TargetRecord
from infra.records.sharing import Sharing, SharingMode
from models.config.recipe import load_recipe
from tasks.plan import plan_recipe
from tasks.prepare import refuse_small_stores, warm_up_warning

TINY = Path(__file__).parents[2] / "recipes" / "tiny.yaml"
TARGET = TargetRecord(
    name="t", path="/t", revision="0", model_type="llama", hidden_size=192, num_layers=4, vocab_size=1024, licence="x"
)
SAMPLES = SamplesRecord(
    path="/s",
    dataset_hash="0",
    template_hash="none",
    train_samples=10,
    heldout_samples=2,
    train_tokens=2560,
    longest=256,
    supervised_share=1.0,
    dropped=0,
    truncated=0,
    unusable=0,
)
# 256 tokens x 4 states x 192 x 4 bytes = 0.75 MiB; 2 per step x 3 steps + 8 leased + 1 in the engine: 11.25 MiB.


@pytest.mark.parametrize(("mode", "setting"), [("apart", "budget_mib"), ("alternate", "round_mib")])
def test_a_budget_that_could_stall_the_run_is_refused_with_the_numbers(mode: SharingMode, setting: str) -> None:
    samples = SAMPLES.model_copy(update={"train_tokens": 25600})
    refuse_small_stores(load_recipe(TINY), TARGET, samples, Sharing(mode=mode, why="", budget_bytes=12 * 2**20))
    with pytest.raises(ValueError, match=rf"11\.2 MiB\. Set transport\.{setting}=12 or more"):
        refuse_small_stores(load_recipe(TINY), TARGET, samples, Sharing(mode=mode, why="", budget_bytes=11 * 2**20))


def test_a_step_has_no_more_samples_than_there_are() -> None:
    config = load_recipe(TINY, ["training.samples_per_step=1000"])
    # 10 per step x 3 steps + 9 being captured.
    refuse_small_stores(config, TARGET, SAMPLES, Sharing(mode="apart", why="", budget_bytes=30 * 2**20))
    assert plan_recipe(config, None, SAMPLES).job.samples_per_step == 10


def test_a_warm_up_that_outlasts_the_run_is_told() -> None:
    config = load_recipe(TINY, ["training.warmup_steps=5"])
    assert warm_up_warning(config, SAMPLES) == ""  # 5 steps of 2 samples
    config = load_recipe(TINY, ["training.warmup_steps=50"])
    assert warm_up_warning(config, SAMPLES) == (
        "training.warmup_steps=50 exceeds the run's 5 steps: the learning rate ends at 10% of training.learning_rate, "
        "so lower it"
    )


def test_a_round_that_is_a_whole_epoch_cannot_stall() -> None:
    whole = Sharing(mode="alternate", why="", budget_bytes=2560 * 4 * 192 * 4)
    refuse_small_stores(load_recipe(TINY), TARGET, SAMPLES, whole)
