from models.benchmark.reference import speed_record


def test_a_possible_speed_is_published():
    record = speed_record(tokens=300, plain_s=30.0, speculative_s=15.0, acceptance_length=2.0)
    assert (record.plain_tokens_per_s, record.speculative_tokens_per_s) == (10.0, 20.0)
    assert record.speedup == 2.0
    assert not record.flagged


def test_three_percent_over_the_acceptance_length_are_noise():
    assert not speed_record(100, 2.05, 1.0, acceptance_length=2.0).flagged


def test_an_impossible_speed_is_flagged_and_not_published():
    record = speed_record(100, 2.07, 1.0, acceptance_length=2.0)
    assert record.flagged
    assert record.speedup is None
    assert record.speculative_tokens_per_s is None
    assert "2.07" in record.note
    assert "2.00" in record.note
