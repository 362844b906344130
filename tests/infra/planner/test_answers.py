"""How long regeneration is expected to take: what bounds decoding, and that the plan counts it."""

from pathlib import Path

import pytest

from infra.planner.answers import FREE_SHARE, Answers
from infra.planner.devices import DEVICES
from infra.planner.memory import engine_static
from infra.planner.page import verdicts
from infra.planner.shapes import TargetShape
from models.config.recipe import load_recipe
from tasks.plan import plan_recipe

RECIPES = Path(__file__).parents[3] / "recipes"
TARGET = TargetShape(
    hidden_size=1000, num_layers=10, vocab_size=10_000, parameters=10**9, active_parameters=10**9,
    attention_width=1000, cache_width=500,
)  # fmt: skip
ONE = Answers(prompt_tokens=100, answer_tokens=1000, copies=1, devices_per_copy=1, most_requests=1, bandwidth_share=0.5)


def tokens_per_s(answers: Answers) -> float:
    return answers.tokens_per_s(TARGET, "bfloat16", DEVICES["H100"], 0.5)


def test_one_request_reads_all_weights_for_every_token() -> None:
    step_s = 2 * (10**9 + 600 * 5000) / (0.5 * 3.35e12)
    prefill_s = 100 * (2 * 10**9 + 4 * 1000 * 10 * 50) / (0.5 * 989e12)
    assert tokens_per_s(ONE) == pytest.approx(1 / (step_s + prefill_s / 1000))


def test_many_requests_are_bound_by_arithmetic() -> None:
    many = tokens_per_s(ONE.model_copy(update={"most_requests": 10_000, "prompt_tokens": 1, "answer_tokens": 1}))
    assert many == pytest.approx(0.5 * 989e12 / (4 * 10**9), rel=0.1)


def test_copies_multiply_and_long_answers_take_room() -> None:
    assert tokens_per_s(ONE.model_copy(update={"copies": 3})) == pytest.approx(3 * tokens_per_s(ONE))
    long = ONE.model_copy(update={"most_requests": 256, "answer_tokens": 100_000})
    room = 0.85 * DEVICES["H100"].memory_bytes - 2 * 10**9
    assert long.requests(TARGET, "bfloat16", DEVICES["H100"]) == int(room / (100_100 * 5000 * 2))
    assert long.requests(TARGET, "bfloat16", DEVICES["cpu"]) == 256


@pytest.mark.parametrize(
    ("settings", "copies", "devices", "requests"),
    [
        ([], 4, 1, 256),
        (["generator.count=1"], 1, 4, 256),
        (["generator.count=1", "generator.sglang.tensor_parallel=2"], 2, 2, 256),
        (["plan.memory_gb=48"], 4, 1, 128),
        (["generator.engine=transformers"], 1, 1, 16),
        (["pools.kind=slurm", "transport.kind=mooncake"], 1, 1, 256),
    ],
)
def test_every_inference_gpu_answers_with_sglang(settings: list[str], copies: int, devices: int, requests: int) -> None:
    answers = plan_recipe(load_recipe(RECIPES / "qwen3-8b.yaml", settings)).job.answers
    assert answers
    assert (answers.copies, answers.devices_per_copy, answers.most_requests) == (copies, devices, requests)
    assert (answers.prompt_tokens, answers.answer_tokens) == (1, 2048)


def test_sglang_s_cache_has_what_its_server_gives_it() -> None:
    settings = ["plan.memory_gb=26", "plan.answer_tokens=2048", "pools.sharing=apart", "plan.gpus=8"]
    (served, fixed, plain) = (
        plan_recipe(load_recipe(RECIPES / "qwen3-8b.yaml", [*settings, *more])).job.answers
        for more in ([], ["generator.sglang.memory_fraction=0.8"], ["generator.engine=transformers"])
    )
    assert served
    assert fixed
    assert plain
    assert served.memory_share == pytest.approx(engine_static(26 * 10**9, 1) / 26e9)
    assert (fixed.memory_share, plain.memory_share) == (0.8, FREE_SHARE)


def test_time_and_cost_include_regeneration() -> None:
    recipe = RECIPES / "qwen3-8b.yaml"
    plan, without = (plan_recipe(load_recipe(recipe, settings)) for settings in ([], ["data.regeneration=null"]))
    assert without.regeneration_s == 0
    assert "Regeneration" not in verdicts(without)
    assert plan.regeneration_s == pytest.approx(100_000 * 2048 / (plan.regenerated_per_s or 0))
    assert plan.device_hours == pytest.approx(without.device_hours + plan.regeneration_s / 3600 * 4)
    assert "100,000 answers of 2,048 tokens" in verdicts(plan)["Regeneration"]
    shorter = plan_recipe(load_recipe(recipe, ["plan.answer_tokens=512"])).job.answers
    assert shorter
    assert (shorter.prompt_tokens, shorter.answer_tokens) == (1536, 512)


def test_answering_while_capturing_slows_capture_and_leaves_little_before() -> None:
    """Twice the held-out share is answered before; a generator gives no more than its target answers."""
    recipe = RECIPES / "qwen3-8b.yaml"
    two = plan_recipe(load_recipe(recipe))
    settings = ["generator.engine=sglang", "data.regeneration={capture: true, max_new_tokens: 2048}"]
    one = plan_recipe(load_recipe(recipe, settings))
    answers = one.job.answers
    assert answers
    assert answers.before == 2 * 0.1
    assert one.regeneration_s == pytest.approx(0.2 * 100_000 * 2048 / (one.regenerated_per_s or 0))
    assert "20,000 answers of 2,048 tokens" in verdicts(one)["Regeneration"]
    generators = one.job.inference_devices // one.job.devices_per_generator
    assert one.present.inference == pytest.approx((one.regenerated_per_s or 0) / 2048)
    assert one.sides.per_generator * generators == pytest.approx(one.present.inference)
    assert one.present.inference < two.present.inference
