"""The page of target families is what the measured cells say."""

import json

from benchmarks.target_page import PAGE, RESULT, page


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(json.loads(RESULT.read_text())), "run python benchmarks/targets.py"
