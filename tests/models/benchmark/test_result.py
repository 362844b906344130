from models.benchmark.result import Lengths, against_baselines


def test_a_draft_that_wins():
    text = against_baselines(4, Lengths(3.65, 2.16, 2.4, 0.6), Lengths(2.0, 1.2, 1.3, 0.7), "T=1")
    assert "beats prompt lookup (2.16) and Token Recycling (2.40) here: 3.65 tokens" in text
    assert "does not" not in text
    assert "2.00 against 1.20 and 1.30" in text


def test_a_draft_that_beats_one_of_two():
    text = against_baselines(4, Lengths(2.3, 2.16, 2.4, 0.6), Lengths(2.0, 1.2, 1.3, 0.7), "T=1")
    assert "beats prompt lookup (2.16) but does not beat Token Recycling (2.40) here: 2.30 tokens" in text
    assert "repeats" not in text


def test_a_draft_that_loses_to_a_text_that_repeats_itself():
    text = against_baselines(4, Lengths(1.61, 1.83, 1.7, 0.31), Lengths(1.45, 1.1, 1.2, 0.7), "T=1")
    assert "does not beat prompt lookup (1.83) or Token Recycling (1.70)" in text
    assert "repeats itself (distinct-token share 0.31, 0.70 when sampled)" in text


def test_a_draft_that_just_loses_gets_no_excuse():
    text = against_baselines(4, Lengths(1.61, 1.83, 1.5, 0.7), Lengths(1.45, 1.9, 1.2, 0.6), "T=1")
    assert "does not beat" in text
    assert "repeats" not in text
