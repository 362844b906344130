"""Scheduled verification and calibration against plain ones."""

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infra.records.goodput import CostFit
from models.decoding.calibration import GRID, calibrate, errors_by_position, expected_error, fit_temperatures
from models.decoding.goodput import TERMS

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from scheduled_verification import admitted, ragged_seconds


def slowly(survivals: list[list[float]], seconds) -> list[int]:
    """Round by round: of all texts' next proposals the likeliest one, until speed falls."""
    lengths, emitted = [0] * len(survivals), float(len(survivals))
    while True:
        nexts = [(row[length], -text) for text, (row, length) in enumerate(zip(survivals, lengths, strict=True))
                 if length < len(row) and row[length] > 0]  # fmt: skip
        if not nexts:
            return lengths
        chance, text = max(nexts)
        now = len(survivals) + sum(lengths)
        if (emitted + chance) / seconds(now + 1) < emitted / seconds(now):
            return lengths
        lengths[-text] += 1
        emitted += chance


@given(
    chances=st.integers(1, 4).flatmap(
        lambda size: st.lists(st.lists(st.floats(0.05, 1), min_size=size, max_size=size), min_size=1, max_size=5)
    ),
    each=st.floats(0, 0.5),
    knee=st.integers(1, 12),
)
def test_it_admits_the_likeliest_until_speed_falls(chances, each, knee):
    survivals = torch.tensor(chances, dtype=torch.double).cumprod(-1)

    def seconds(verified: int) -> float:
        return 1 + each * max(0, verified - knee)

    found = admitted(survivals, seconds)
    assert found == slowly(survivals.tolist(), seconds)
    if not each:
        assert found == [survivals.shape[1]] * len(survivals), "what costs nothing is verified"


def test_a_chain_ends_where_its_survival_does():
    assert admitted(torch.tensor([[0.9, 0.8, 0.0], [0.7, 0.0, 0.0]]), lambda _: 1.0) == [2, 1]


def test_what_several_tokens_cost_at_once_does_not_end_the_search():
    """By the whole cost no first proposal pays, although all seven together do."""
    jump = CostFit(**dict.fromkeys(TERMS, 0.0) | {"constant": 1.0, "several": 1.0, "per_token": 0.01}, knee=0)
    survivals = torch.full((1, 7), 0.9).cumprod(-1)
    assert (1 + float(survivals.sum())) / jump.seconds(1, 8) > 1.5 / jump.seconds(1, 1)
    assert admitted(survivals, lambda total: jump.seconds(1, total)) == [0]
    assert admitted(survivals, lambda total: ragged_seconds(jump, 1, total, 8)) == [7]


def test_expected_error_is_that_of_bins():
    chances = torch.tensor([0.05, 0.05, 0.95, 1.0])
    assert expected_error(chances, torch.tensor([False, False, True, True])) == pytest.approx((0.1 + 0.05) / 4)
    assert expected_error(chances, torch.tensor([True, True, False, False])) == pytest.approx((1.9 + 1.95) / 4)


def drawn(temperatures: list[float], steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits that are too sure by `temperatures`, and what happened."""
    g = torch.Generator().manual_seed(7)
    logits = 2.5 * torch.randn(steps, len(temperatures), generator=g, dtype=torch.double) + 0.5
    chances = (logits / torch.tensor(temperatures, dtype=torch.double)).sigmoid()
    return logits, (torch.rand(chances.shape, generator=g, dtype=torch.double) < chances).long().cumprod(-1).sum(-1)


def test_temperatures_are_recovered_and_errors_shrink():
    true = [1.0, 2.0, 3.0]
    logits, accepted = drawn(true, 40_000)
    found = fit_temperatures(logits, accepted)
    step = float(GRID[1] / GRID[0])
    assert all(1 / step**2.5 < one / other < step**2.5 for one, other in zip(found, true, strict=True)), found
    fit = calibrate(logits, accepted)
    assert max(fit.errors_after) < 0.01
    assert max(fit.errors_before) > 0.04
    assert fit.errors_before == tuple(errors_by_position(logits, accepted, [1.0] * 3))
    assert fit.steps == 40_000
    assert fit.meaningful


def test_few_steps_of_exact_chances_show_an_error():
    """That is no reason to distrust them; chances of other events are."""
    logits, accepted = drawn([1.0, 1.0], 300)
    fit, many = calibrate(logits, accepted), calibrate(*drawn([1.0, 1.0], 40_000))
    assert min(fit.errors_by_chance) > 0.02
    assert fit.errors_after == pytest.approx(fit.errors_by_chance, abs=0.04)
    assert max(many.errors_by_chance) < 0.2 * min(fit.errors_by_chance)
    assert fit.meaningful
    others = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    assert not calibrate(8 * logits[others].abs(), accepted).meaningful
