import pytest

from models.decoding.acceptance import AcceptedCounts, acceptance_length, by_position, distinct_token_share, summarise


def test_ratio_of_sums_by_hand():
    counts = [
        AcceptedCounts(3, (3, 0)),
        AcceptedCounts(3, (1,), cut=1),
        AcceptedCounts(3, ()),
        AcceptedCounts(3, (2, 2, 0)),
    ]
    # 6 steps emit 4+1, 2, nothing, 3+3+1 tokens.
    assert acceptance_length(counts) == 14 / 6
    # Position 1 in 4 of 6 steps; position 2 in 3 of those 4; position 3 in 1 of those 3.
    assert by_position(counts, 3) == (4 / 6, 3 / 4, 1 / 3)


def test_short_answers_count_to_their_end():
    """`safe<eos>`: a step that accepts the end emits one token, as one that refuses it; the rate tells them apart."""
    right, wrong = AcceptedCounts(4, (), ended=1), AcceptedCounts(4, (0,))
    assert summarise([(right,)] * 9 + [(wrong,)]).length == {4: 1.0}
    assert by_position([right] * 9 + [wrong], 4) == (0.9, None, None, None)
    assert acceptance_length([right]) == 1.0


def test_length_follows_from_the_rates():
    counts = [AcceptedCounts(3, (3, 0, 1, 2, 2, 3, 0))]
    first, second, third = by_position(counts, 3)
    assert None not in (first, second, third)
    assert acceptance_length(counts) == pytest.approx(1 + first + first * second + first * second * third)


def test_a_position_never_offered_has_no_rate():
    assert by_position([AcceptedCounts(3, (0, 0))], 3) == (0.0, None, None)


def test_no_complete_step_is_refused():
    with pytest.raises(ValueError, match="max_new_tokens"):
        acceptance_length([AcceptedCounts(3, (), cut=1), AcceptedCounts(3, ())])


def test_summary_by_lookahead_survives_json():
    walks = [(AcceptedCounts(1, (1, 0)), AcceptedCounts(2, (2,))), (AcceptedCounts(1, (0,)), AcceptedCounts(2, (0, 1)))]
    summary = summarise(walks)
    assert summary.length == {1: 4 / 3, 2: 6 / 3}
    assert summary.steps == {1: 3, 2: 3}
    assert summary.by_position == (2 / 3, 1 / 2)
    assert type(summary).model_validate_json(summary.model_dump_json()) == summary


def test_ordinary_text_of_any_length_is_not_repetitive():
    """Distinct tokens grow ever more slowly: of the whole text a tenth is distinct, of any part of it most."""
    text = [token for part in range(64) for token in (*range(100), *range(100 + part, 128 + part))]
    assert len(set(text)) / len(text) < 0.1
    assert distinct_token_share([text]) == 1
    assert distinct_token_share([list(range(20)) * 50]) == pytest.approx(20 / 128, abs=0.01)


def test_distinct_token_share():
    assert distinct_token_share([[1, 1, 1, 1]]) == 0.25
    assert distinct_token_share([[1, 1, 1, 1], [1, 2, 3, 4]]) == (0.25 + 1) / 2
