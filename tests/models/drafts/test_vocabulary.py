import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.drafts.vocabulary import DraftVocabulary


@given(st.lists(st.integers(0, 20), min_size=4, max_size=60), st.data())
def test_keeps_the_most_frequent_and_maps_both_ways(counts, data):
    size = data.draw(st.integers(1, len(counts)))
    vocabulary = DraftVocabulary.by_frequency(torch.tensor(counts), size)
    kept = vocabulary.target_ids.tolist()
    left_out = [count for token, count in enumerate(counts) if token not in kept]
    assert len(kept) == size
    assert min(counts[token] for token in kept) >= max(left_out, default=0)
    assert vocabulary.t2d.nonzero().squeeze(-1).tolist() == kept
    again = DraftVocabulary.from_offsets(vocabulary.d2t, len(counts))
    assert torch.equal(again.target_ids, vocabulary.target_ids)


@pytest.mark.parametrize("ids", [[], [3, 3], [2, 1], [-1, 2], [1, 9]])
def test_refuses_maps_that_are_not_a_vocabulary(ids):
    with pytest.raises(ValueError, match="draft vocabulary"):
        DraftVocabulary(torch.tensor(ids, dtype=torch.int64), 9)


def test_refuses_more_tokens_than_the_target_has():
    with pytest.raises(ValueError, match=r"draft\.vocab_size 5"):
        DraftVocabulary.by_frequency(torch.ones(4), 5)
