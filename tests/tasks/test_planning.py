"""The plan of a recipe: what is known, what is estimated, how it is shown, and what measured rates make of it."""

import json
from pathlib import Path

import pytest

from infra.files.atomic import write_atomically
from infra.planner.answers import Answers
from infra.planner.page import plan_page, verdicts
from infra.planner.plan import Plan, comparison, corrected, read_plan
from infra.quantities import byte_size, duration, figure, si
from infra.records.data_path import MoreData, SamplesRecord, SideRates, TargetRecord, TrainingResult
from infra.refusal import Refusal
from models.config.recipe import load_recipe
from tasks.core_rates import core_rates
from tasks.plan import checked_plan, on_this_machine, plan_recipe

RECIPES = Path(__file__).parents[2] / "recipes"


ONE_AND_SEVEN = [
    *("generator.engine=transformers", "generator.count=1", "pools.inference_gpus=1", "pools.training_gpus=7"),
    *("training.ranks=7", "training.samples_per_step=56", "training.micro_batches=2", "plan.gpus=8"),
]


@pytest.fixture
def plan() -> Plan:
    return plan_recipe(load_recipe(RECIPES / "qwen3-8b.yaml", ONE_AND_SEVEN))


def test_prepared_samples_are_known_and_others_are_estimated(samples: SamplesRecord) -> None:
    config = load_recipe(RECIPES / "tiny.yaml")
    known, guessed = plan_recipe(config, None, samples).job, plan_recipe(config).job
    assert (known.samples, known.mean_tokens, known.longest_tokens) == (1234, 6394, 255)
    assert (guessed.samples, guessed.mean_tokens, guessed.longest_tokens) == (1600, 256, 256)
    assert [note for note in guessed.assumptions if "estimated from data.max_tokens" in note]
    assert not [note for note in known.assumptions if "estimated" in note]


@pytest.fixture
def target(tmp_path: Path) -> TargetRecord:
    """A target of four layers and 12 attention heads."""
    settings = {
        "model_type": "llama", "hidden_size": 768, "num_hidden_layers": 4, "vocab_size": 1024, "head_dim": 64,
        "num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 2048,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(settings))
    return TargetRecord.model_construct(path=str(tmp_path))


def test_a_run_is_planned_with_its_own_target(target: TargetRecord, samples: SamplesRecord) -> None:
    config = load_recipe(RECIPES / "one-gpu-80gb.yaml")
    assert plan_recipe(config).job.target == config.plan.target
    planned = plan_recipe(on_this_machine(config), target, samples).job.target
    assert (planned.hidden_size, planned.num_layers) == (768, 4)
    # The shape of this one can only be given.
    (Path(target.path) / "config.json").write_text('{"model_type": "falcon_mamba", "hidden_size": 768}')
    assert plan_recipe(config, target, samples).job.target == config.plan.target
    unknown = config.model_copy(update={"plan": config.plan.model_copy(update={"target": None})})
    with pytest.raises(Refusal, match=r"give the target's shape by plan\.target"):
        plan_recipe(unknown, target, samples)


def test_gpus_that_do_not_divide_the_target_are_refused_whatever_shape_is_assumed(target: TargetRecord) -> None:
    few = "data.max_samples=64"  # both sides take turns, and this machine's disk must hold a round
    given = [f"target.name={target.path}", "generator.count=1", "pools.inference_gpus=5", few]
    with pytest.raises(Refusal, match=r"cannot divide the target's 12 attention heads .* 1, 2 or 4"):
        checked_plan(load_recipe(RECIPES / "qwen3-8b.yaml", given))
    absent = ["target={source: gguf-package, name: never-converted, aux_layer_ids: [1]}"]
    checked_plan(load_recipe(RECIPES / "qwen3-8b.yaml", [*given, *absent]))


def test_answers_that_exist_are_not_planned(samples: SamplesRecord) -> None:
    assert plan_recipe(load_recipe(RECIPES / "qwen3-8b.yaml"), None, samples).regeneration_s == 0


def test_a_local_file_says_how_many_samples_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(("x" * 399 + "\n") * 1000)
    unknown = ["data.max_samples=null", "plan.mean_tokens=null"]
    job = plan_recipe(load_recipe(RECIPES / "qwen3-8b.yaml", [f"data.source={file}", *unknown])).job
    assert (job.samples, job.mean_tokens) == (900, 100)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert (
        plan_recipe(load_recipe(RECIPES / "qwen3-8b.yaml", ["data.source=~/prompts.jsonl", *unknown])).job.samples
        == 900
    )


@pytest.mark.parametrize(
    ("overrides", "used", "note"),
    [
        (["pools.inference_gpus=2", "generator.count=1"], 1, "a generator leases 2 GPUs and uses one"),
        (["pools.inference_gpus=2", "generator.engine=sglang"], 2, ""),
        (["pools.inference_gpus=4", "generator.engine=sglang", "generator.count=2"], 2, ""),
    ],
)
def test_a_generator_uses_the_gpus_that_its_engine_can(overrides: list[str], used: int, note: str) -> None:
    job = plan_recipe(load_recipe(RECIPES / "qwen3-8b.yaml", [*ONE_AND_SEVEN, *overrides])).job
    assert job.devices_per_generator == used
    assert any(note in assumption for assumption in job.assumptions)


def test_figures_of_the_device_can_be_given() -> None:
    given = ["plan.memory_gb=100", "plan.peak_tflops=500", "plan.price_per_hour=2"]
    plan = plan_recipe(load_recipe(RECIPES / "qwen3-8b.yaml", given))
    assert (plan.job.memory_bytes, plan.job.device.peak["bfloat16"]) == (100 * 10**9, 500e12)
    assert plan.cost == pytest.approx(plan.device_hours * 2)


def test_a_cores_speed_is_measured_unless_it_is_given() -> None:
    job = plan_recipe(load_recipe(RECIPES / "tiny.yaml")).job
    assert job.device.peak == core_rates()
    assert all(1e9 < rate < 1e13 for rate in job.device.peak.values())
    assert f"a core reaches {figure(job.device.peak['float32'] / 1e9)} GFLOP/s in float32" in job.assumptions[0]
    assert (job.inference_share, job.training_share) == (0.55, 0.6)
    given = plan_recipe(load_recipe(RECIPES / "tiny.yaml", ["plan.peak_tflops=0.2", "plan.training_share=0.1"])).job
    assert given.device.peak["float32"] == 200e9
    assert (given.inference_share, given.training_share) == (0.55, 0.1)
    assert "measured on this machine" not in "".join(given.assumptions)


def test_the_page_has_every_table(plan: Plan) -> None:
    page = plan_page(plan)
    assert "| 1 + 7 (recipe) |" in page
    assert "| hidden states, a token | 32 KiB |" in page
    for title in ("Split of the devices", "Computing", "Memory of a trainer rank", "What flows", "Assumed"):
        assert f"### {title}" in page


def test_measured_rates_correct_the_plan(plan: Plan, tmp_path: Path) -> None:
    tokens = plan.job.mean_tokens
    rates = SideRates(
        inference=plan.present.inference * tokens * 2, transport=None, training=plan.present.training * tokens / 2,
        data_wait_share=0.0, generators=1, ranks=7,
    )  # fmt: skip
    now = corrected(plan, rates)
    assert now is not None
    assert now.present.inference == pytest.approx(2 * plan.present.inference)
    assert now.job.training_share == pytest.approx(plan.job.training_share / 2)
    assert now.seconds < plan.seconds  # inference was the slow side
    told = comparison(plan, rates)
    assert "86.0% of the peak in place of 43%" in told["inference"]
    answers = Answers(
        prompt_tokens=9,
        answer_tokens=48,
        copies=1,
        devices_per_copy=1,
        most_requests=1,
        bandwidth_share=0.5,
        before=0.2,
    )
    in_one_pass = plan.model_copy(update={"job": plan.job.model_copy(update={"answers": answers})})
    assert "peak" not in comparison(in_one_pass, rates)["inference"], (
        "answers are decoded, which prefill's peak ignores"
    )
    assert "of the peak" in comparison(in_one_pass, rates)["training"]
    assert told["split"].startswith("2 + 6 GPUs (inference + training) would give")
    (tmp_path / "plan.json").write_text(plan.model_dump_json())
    assert read_plan(tmp_path / "plan.json") == plan
    assert read_plan(tmp_path / "none.json") is None
    (tmp_path / "plan.json").write_text('{"of_another_version": 1}')
    assert read_plan(tmp_path / "plan.json") is None, "a report is written without it"


def test_an_earlier_run_says_what_more_data_would_bring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: TrainingResult
) -> None:
    """The latest finished one of the same target and draft."""
    monkeypatch.setenv("DRAFTSMITH_RUNS", str(tmp_path))
    mine, other = load_recipe(RECIPES / "tiny.yaml"), load_recipe(RECIPES / "tiny.yaml", ["draft.ttt_steps=2"])
    more = MoreData(lower=0.08, upper=0.12)
    assert "Twice the data" not in verdicts(plan_recipe(mine))
    for name, recipe, told in (
        ("mine", mine, more),
        ("other", other, MoreData(lower=9.0, upper=9.0)),
        ("no", mine, None),
    ):
        write_atomically(tmp_path / name / "config.json", recipe)
        write_atomically(tmp_path / name / "training.json", trained.model_copy(update={"more_data": told}))
    write_atomically(tmp_path / "unfinished" / "config.json", mine)
    write_atomically(tmp_path / "of another version" / "config.json", mine)
    write_atomically(tmp_path / "of another version" / "training.json", '{"steps": 1, "forgotten": 2}')
    write_atomically(tmp_path / "damaged" / "config.json", "{")
    told = verdicts(plan_recipe(mine))["Twice the data"]
    assert told == (
        "after 1,000 tokens in run mine: +0.08 to +0.12 tokens per verification step on held-out text (90 % confidence)"
    )


def test_nothing_is_compared_before_both_sides_are_seen(plan: Plan) -> None:
    unseen = SideRates(inference=None, transport=None, training=5.0, data_wait_share=0.0, generators=0, ranks=7)
    assert not comparison(plan, unseen)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (byte_size(32 * 1024), "32 KiB"),
        (byte_size(5 * 2**40), "5 TiB"),
        (si(45e12, "FLOP"), "45 TFLOP"),
        (figure(1234.5), "1,234"),
        (figure(0.1234), "0.123"),
        (byte_size(1000 * 2**20), "1,000 MiB"),
        (duration(45), "45 s"),
        (duration(3600 * 3 + 61), "3 h 1 min"),
        (duration(3600 * 24 * 5), "5 days 0 h"),
    ],
)
def test_every_figure_has_its_unit(shown: str, expected: str) -> None:
    assert shown == expected
