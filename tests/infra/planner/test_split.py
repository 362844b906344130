"""The best split of a node against a simulation of it, and against a published one."""

import heapq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.planner.devices import DEVICES
from infra.planner.shapes import draft_flops, prefill_flops, target_shape
from infra.planner.split import Sides, Split, advice, all_splits, best_split, measured_sides, split
from infra.records.data_path import SideRates
from models.config.draft import parse_draft_config

NODE = 8
STEPS = 60


def simulated(sides: Sides, inference: int, training: int, store: int) -> float:
    """Samples per second of a node, event by event, after its first steps.

    Every generator makes one sample after the other while the store, which holds `store` samples being made or ready,
    has room. The trainer takes a step as soon as all its samples are ready, which frees their places, and is busy until
    the rank with most of them is through.
    """
    generators, steps = inference // sides.devices_per_generator, sides.samples_per_step
    step_s = -(-steps // training) / sides.per_rank
    made: list[float] = []  # when each sample in the making will be ready
    idle, ready, now, busy_until, begun = generators, 0, 0.0, 0.0, []
    while len(begun) < STEPS:
        while idle and ready + len(made) < store:
            heapq.heappush(made, now + 1 / sides.per_generator)
            idle -= 1
        if ready >= steps and now >= busy_until:
            ready, busy_until = ready - steps, now + step_s
            begun.append(now)
            continue
        waited_for = [busy_until] if ready >= steps else []
        now = min([*waited_for, *made[:1]])
        while made and made[0] <= now:
            heapq.heappop(made)
            ready, idle = ready + 1, idle + 1
    warm = STEPS // 3
    return (STEPS - 1 - warm) * steps / (begun[-1] - begun[warm])


def simulated_optimum(sides: Sides, devices: int = NODE) -> dict[str, float]:
    """Samples per second of every split."""
    store = 3 * sides.samples_per_step + 12 * devices
    return {
        one.name: simulated(sides, one.inference_devices, one.training_devices, store)
        for one in all_splits(sides, devices)
    }


@pytest.mark.parametrize(
    ("sides", "expected"),
    [
        (Sides(per_generator=55.0, per_rank=8.3, samples_per_step=672), "1 + 7"),
        (Sides(per_generator=14.0, per_rank=10.9, samples_per_step=56), "4 + 4"),
        (Sides(per_generator=14.0, per_rank=10.9, samples_per_step=15), "3 + 5"),  # 4 ranks would wait for the fourth
        (Sides(per_generator=3.0, per_rank=20.0, samples_per_step=32), "7 + 1"),
        (Sides(per_generator=9.0, devices_per_generator=4, per_rank=2.0, samples_per_step=32), "4 + 4"),
    ],
)
def test_the_best_split_of_eight_gpus_is_the_simulations(sides: Sides, expected: str) -> None:
    found = simulated_optimum(sides)
    best = best_split(sides, NODE)
    assert best is not None
    assert best.name == max(found, key=lambda name: found[name]) == expected
    assert best.samples_per_s == pytest.approx(found[best.name], rel=0.02)


rates = st.floats(min_value=0.5, max_value=50.0)


@settings(max_examples=40, deadline=None)
@given(rates, rates, st.integers(min_value=8, max_value=64), st.sampled_from([1, 2]))
def test_no_split_of_the_simulation_is_faster(per_generator: float, per_rank: float, step: int, wide: int) -> None:
    sides = Sides(per_generator=per_generator, per_rank=per_rank, samples_per_step=step, devices_per_generator=wide)
    found, best = simulated_optimum(sides), best_split(sides, NODE)
    assert best is not None
    assert found[best.name] >= 0.97 * max(found.values())
    for one in all_splits(sides, NODE):
        assert one.samples_per_s == pytest.approx(found[one.name], rel=0.03)


def test_the_published_optimum_of_an_h200_node() -> None:
    """1 server + 7 trainers at 50.1 samples/s, 2 + 6 at 39.0 (SpecForge, domino-disaggregated-performance.md).

    From shapes: Qwen3-8B, samples of 550 tokens, and a draft of five of its layers on five target layers, 256 blocks
    of 16 rows whatever the sample's length, two products with the whole vocabulary for every row (Domino has a second
    one in place of our target logits). The page counts 45 TFLOP per sample.
    From the page: prefill reaches 43 % of the peak; a draft step by itself 43.5 % (211 ms for two samples), and as part
    of the run 240 ms for the same two, so 38 %. At the 43.5 % of the isolated step the planner would put 2 + 6 some
    percent ahead of 1 + 7: what a rank loses outside of its kernels decides.
    """
    target = target_shape(
        {"hidden_size": 4096, "num_hidden_layers": 36, "vocab_size": 151936, "num_attention_heads": 32,
         "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288}
    )  # fmt: skip
    config = parse_draft_config(
        {"method": "dflash", "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "intermediate_size": 12288,
         "anchors": 256}
    )  # fmt: skip
    draft, tokens = config.shape(target, 5, "bfloat16"), 550
    one_more_product = 2 * target.hidden_size * target.vocab_size * draft.rows(tokens)
    flops = draft_flops(draft, target, tokens, 1.0, whole_head=False) + one_more_product
    assert flops == pytest.approx(45e12, rel=0.05)
    peak = DEVICES["H200"].peak["bfloat16"]
    sides = Sides(
        per_generator=0.43 * peak / prefill_flops(target, tokens, top_token=False),
        per_rank=0.435 * 211 / 240 * peak / flops,
        samples_per_step=16 * 7 * 6,  # two samples x eight micro-batches on every rank, whole for 7 ranks and for 6
    )
    assert 52 <= sides.per_generator <= 57  # what the page says one server supplied
    best = best_split(sides, NODE)
    assert best is not None
    assert (best.name, best.slow_side) == ("1 + 7", "inference")
    assert best.samples_per_s == pytest.approx(50.1, rel=0.12)
    second = split(sides, 2, 6)
    assert second.slow_side == "training"
    assert second.samples_per_s < 0.95 * best.samples_per_s
    found = simulated_optimum(sides)
    assert max(found, key=lambda name: found[name]) == "1 + 7"


def measured(inference: float, training: float, generators: int, ranks: int) -> SideRates:
    return SideRates(
        inference=inference, transport=None, training=training, data_wait_share=0.4, generators=generators, ranks=ranks
    )


def test_measured_rates_say_which_split_is_better() -> None:
    assumed = Sides(per_generator=99.0, per_rank=99.0, samples_per_step=84)
    sides = measured_sides(measured(6_000.0, 70_000.0, 1, 7), 1_000, assumed)
    assert sides is not None
    assert (sides.per_generator, sides.per_rank) == (6.0, 10.0)
    said = advice(sides, split(sides, 1, 7), "GPU")
    assert said == "5 + 3 GPUs (inference + training) would give 30 samples/s, 400% more than 1 + 7"
    assert "no other one of 8 GPUs is better than 5 + 3" in advice(sides, split(sides, 5, 3), "GPU")


def test_nothing_is_said_before_both_sides_are_seen() -> None:
    assumed = Sides(per_generator=1.0, per_rank=1.0, samples_per_step=8)
    unseen = SideRates(inference=None, transport=None, training=5.0, data_wait_share=0.0, generators=1, ranks=1)
    assert measured_sides(unseen, 100, assumed) is None


def test_a_slow_link_is_the_slow_side() -> None:
    sides = Sides(per_generator=10.0, per_rank=10.0, samples_per_step=8, transport=3.0)
    found: Split = split(sides, 1, 7)
    assert (found.slow_side, found.samples_per_s) == ("transport", 3.0)
