import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.benchmark.harness import Repeat, shape_of, speed
from models.benchmark.reference import TOLERANCE
from models.drafts.trees import DynamicTree


def test_shapes():
    assert shape_of("5") == 5
    assert shape_of("dynamic-3-2-8") == DynamicTree(3, 2, 8)
    with pytest.raises(ValueError, match="from 1 to 16"):
        shape_of("17")


rates = st.lists(st.floats(1.0, 1000.0), min_size=3, max_size=5)


@given(plain=rates, fast=rates, length=st.floats(1.0, 8.0))
def test_an_impossible_speed_is_not_published(plain: list[float], fast: list[float], length: float):
    judged = speed(4, [Repeat(rate, 1.0) for rate in plain], [Repeat(rate, length) for rate in fast])
    ratio = sorted(fast)[len(fast) // 2] if len(fast) % 2 else sum(sorted(fast)[1:3]) / 2
    ratio /= sorted(plain)[len(plain) // 2] if len(plain) % 2 else sum(sorted(plain)[1:3]) / 2
    assert judged.flagged == (judged.speedup is None) == (judged.tokens_per_s is None) == (judged.spread is None)
    if abs(ratio - TOLERANCE * length) > 1e-6:
        assert judged.flagged == (ratio > TOLERANCE * length)
    if judged.speedup is not None:
        assert judged.speedup == pytest.approx(ratio)
        assert judged.spread == (min(fast), max(fast))
