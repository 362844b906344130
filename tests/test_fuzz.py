"""Damaged input is accepted, or refused with its place and a remedy: the short form of benchmarks/fuzz.py."""

import pytest

from benchmarks.fuzz import CATEGORIES, run_case

CASES = 25
"""Of each category: 200 in all."""


@pytest.mark.parametrize("category", CATEGORIES)
def test_no_damaged_input_is_a_fault(category: str) -> None:
    ended = {seed: run_case(category, seed) for seed in range(CASES)}
    assert not {seed: said for seed, (outcome, said) in ended.items() if outcome == "fault"}
    assert any(outcome == "refused" for outcome, _ in ended.values())
