"""docs/results.md and docs/scale.md show what the files of benchmarks/results/ hold."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_page_of_results_is_current() -> None:
    sys.path.append(str(ROOT / "benchmarks"))
    import results_page

    assert results_page.PAGE.read_text() == results_page.page(), "run: python benchmarks/results_page.py"


def test_the_measured_tables_of_the_page_on_scale_are_current() -> None:
    sys.path.append(str(ROOT / "benchmarks"))
    import scale_page

    text = scale_page.PAGE.read_text()
    assert scale_page.page(text) == text, "run: python benchmarks/scale_page.py"
