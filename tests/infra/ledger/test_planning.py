import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.ledger.planning import InFlight, balance, check_budget

sizes = st.lists(st.integers(1, 4096), max_size=40)


@given(tokens=sizes, ranks=st.integers(1, 8), micro_batches=st.integers(1, 4))
def test_balance_stays_within_grahams_bound(tokens: list[int], ranks: int, micro_batches: int) -> None:
    places = balance(tokens, ranks, micro_batches)
    assert places == balance(tokens, ranks, micro_batches)
    loads = {(rank, micro_batch): 0 for rank in range(ranks) for micro_batch in range(micro_batches)}
    for count, place in zip(tokens, places, strict=True):
        loads[place] += count
    best_possible = max([*tokens, -(-sum(tokens) // len(loads)), *_pairs(tokens, len(loads))], default=0)
    assert max(loads.values()) <= 4 / 3 * best_possible


def _pairs(tokens: list[int], places: int) -> list[int]:
    """With more samples than places two of the largest places + 1 share one: a lower bound of the optimum."""
    largest = sorted(tokens, reverse=True)
    return [largest[places - 1] + largest[places]] if len(tokens) > places else []


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_hold_about_the_same_number_of_tokens(ranks: int) -> None:
    """Lengths as in GSM8K (log-normal, median 130 tokens), four samples per rank: under 5 % over the mean."""
    dice, imbalance = random.Random(0), []
    for _ in range(300):
        tokens = [max(8, round(dice.lognormvariate(4.87, 0.36))) for _ in range(4 * ranks)]
        loads = [0] * ranks
        for count, (rank, _) in zip(tokens, balance(tokens, ranks, 1), strict=True):
            loads[rank] += count
        imbalance.append(max(loads) * ranks / sum(tokens) - 1)
    assert statistics.mean(imbalance) < 0.05


def test_balance_fills_ranks_before_micro_batches() -> None:
    assert balance([5, 5, 5], ranks=2, micro_batches=2) == [(0, 0), (1, 0), (0, 1)]
    assert balance([1, 9, 4, 4], ranks=2, micro_batches=1) == [(1, 0), (0, 0), (1, 0), (1, 0)]


def _budget(**changes: int) -> None:
    values = {
        "bytes_per_token": 1024,
        "longest_sample_tokens": 1024,
        "samples_per_step": 4,
        "ranks": 2,
        "prefetch_steps": 1,
        "generator_slots": 8,
    }
    check_budget(16 * 2**20, InFlight(**(values | changes)))


def test_budget_refusal_carries_the_numbers() -> None:
    _budget()
    with pytest.raises(ValueError, match=r"16\.0 MiB is too small.*1\.0 MiB.*17 samples.*transport\.budget_mib=17 "):
        _budget(generator_slots=9)
    with pytest.raises(ValueError, match="budget_mib=18"):
        _budget(ranks=5)
