"""docs/results.md shows what the files of benchmarks/results/ hold."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_page_of_results_is_current() -> None:
    sys.path.append(str(ROOT / "benchmarks"))
    import results_page

    assert results_page.PAGE.read_text() == results_page.page(), "run: python benchmarks/results_page.py"
