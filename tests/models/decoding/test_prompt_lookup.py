import torch
from hypothesis import given
from hypothesis import strategies as st

from models.decoding.prompt_lookup import PromptLookup
from models.drafts.proposals import NO_PROPOSAL


def slow_lookup(text: list[int], lookahead: int) -> list[int]:
    """By the words of the definition."""
    for length in (3, 2, 1):
        tail = text[-length:]
        for start in range(len(text) - length - 1, -1, -1):
            if len(tail) == length and text[start : start + length] == tail:
                grown = list(text)
                for position in range(start + length, start + length + lookahead):
                    grown.append(grown[position])
                return grown[len(text) :]
    return [NO_PROPOSAL] * lookahead


@given(text=st.lists(st.integers(0, 4), min_size=2, max_size=40), lookahead=st.integers(1, 7))
def test_rollout_equals_a_search_and_equals_the_proposer(text, lookahead):
    source = PromptLookup()
    rows = source.rollout(torch.tensor(text), torch.empty(len(text) - 1, 0), lookahead)
    assert rows.tolist() == [slow_lookup(text[: row + 2], lookahead) for row in range(len(text) - 1)]
    proposer = source.proposer()
    for row in range(0, len(text) - 1, 3):
        proposed = proposer.propose(torch.tensor(text[: row + 2]), torch.empty(3, 0), lookahead)
        assert proposed.tolist() == rows[row].tolist()


def test_longest_match_then_most_recent():
    text = [1, 2, 3, 4, 9, 2, 3, 5, 8, 3, 6, 1, 2, 3]
    source = PromptLookup()
    assert source.proposer().propose(torch.tensor(text), torch.empty(0, 0), 2).tolist() == [4, 9]
    assert source.proposer().propose(torch.tensor([*text[1:-3], 7, 2, 3]), torch.empty(0, 0), 1).tolist() == [5]


def test_a_loop_is_followed_for_the_whole_lookahead():
    proposed = PromptLookup().proposer().propose(torch.tensor([5, 1, 2, 1, 2, 1]), torch.empty(0, 0), 6)
    assert proposed.tolist() == [2, 1, 2, 1, 2, 1]


def test_nothing_repeats_nothing_is_proposed():
    proposed = PromptLookup().proposer().propose(torch.tensor([1, 2, 3]), torch.empty(0, 0), 3)
    assert proposed.tolist() == [NO_PROPOSAL] * 3
