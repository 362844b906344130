from models.benchmark.words import Lengths, against_prompt_lookup


def test_a_draft_that_wins():
    text = against_prompt_lookup(4, Lengths(3.65, 2.16, 0.6), Lengths(2.0, 1.2, 0.7), "T=1")
    assert "beats prompt lookup" in text
    assert "3.65 against 2.16" in text
    assert "2.00 against 1.20" in text


def test_a_draft_that_loses_to_a_text_that_repeats_itself():
    text = against_prompt_lookup(4, Lengths(1.61, 1.83, 0.31), Lengths(1.45, 1.1, 0.7), "T=1")
    assert "does not beat prompt lookup" in text
    assert "repeats itself (distinct-token share 0.31, 0.70 when sampled)" in text


def test_a_draft_that_just_loses_gets_no_excuse():
    text = against_prompt_lookup(4, Lengths(1.61, 1.83, 0.7), Lengths(1.45, 1.9, 0.6), "T=1")
    assert "does not beat" in text
    assert "repeats" not in text
