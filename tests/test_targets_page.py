"""The page of target families is what the measured cells say."""

import json

from benchmarks.target_page import PAGE, PUBLISHED, RESULT, page


def test_the_page_is_up_to_date() -> None:
    results = [json.loads(file.read_text()) for file in (RESULT, PUBLISHED)]
    assert PAGE.read_text() == page(*results), "run python benchmarks/targets.py"
