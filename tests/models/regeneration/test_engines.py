"""On which GPUs answers are generated, and how many at a time."""

from pathlib import Path

import pytest

from models.config.recipe import load_recipe
from models.regeneration.engines import copies_on

QWEN = Path(__file__).parents[3] / "recipes" / "qwen3-8b.yaml"
GIB = 2**30


@pytest.mark.parametrize(
    ("settings", "gpus", "parallel", "in_flight"),
    [
        ([], [80 * GIB] * 4, (1, 4), 4 * 256),
        (["generator.count=2"], [24 * GIB] * 4, (2, 2), 2 * 128),
        (["generator.count=1"], [80 * GIB] * 4, (4, 1), 256),
        (["generator.count=1", "generator.sglang.data_parallel=4"], [80 * GIB] * 4, (1, 4), 4 * 256),
        (["generator.count=1", "generator.sglang.tensor_parallel=2"], [80 * GIB] * 4, (2, 2), 2 * 256),
        # The first of several machines, with one generator's GPUs.
        (["generator.count=2"], [80 * GIB] * 2, (2, 1), 256),
        (["generator.sglang.requests_in_flight=7"], [], (None, 1), 7),
    ],
)
def test_every_leased_gpu_holds_a_copy_or_a_part_of_one(
    settings: list[str], gpus: list[int], parallel: tuple[int | None, int], in_flight: int
) -> None:
    served, requests = copies_on(load_recipe(QWEN, settings), gpus)
    assert (served.tensor_parallel, served.data_parallel) == parallel
    assert requests == in_flight
