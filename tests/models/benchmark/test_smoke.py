"""What the smoke test after a promotion lets pass, and what it does not."""

import pytest

from models.benchmark.smoke import judge, ratio


@pytest.mark.parametrize(
    ("here", "mismatches", "served_gap", "passed", "word"),
    [
        (2.0, 0, None, True, "2.00 when benchmarked"),
        (2.09, 0, 0.04, True, "+4.0% in the serving engine"),
        (2.11, 0, None, False, "acceptance length 2.11, 2.00 when it was benchmarked"),
        (1.0, 0, None, False, "acceptance length 1.00"),
        (2.0, 1, None, False, "not lossless: 1 mismatches"),
        (2.0, 0, -0.3, False, "differs from it by -30.0%"),
    ],
)
def test_a_draft_must_decode_as_it_was_benchmarked(
    here: float, mismatches: int, served_gap: float | None, passed: bool, word: str
) -> None:
    result = judge(here, 2.0, mismatches, served_gap, conversations=8, max_gap=0.05)
    assert result.passed == passed
    assert word in result.reason


def test_the_ratio_is_one_of_sums() -> None:
    assert ratio([(10, 10), (30, 10)]) == 2.0
