import torch
from hypothesis import given
from hypothesis import strategies as st

from models.decoding.copying import CopyingProposer
from models.decoding.prompt_lookup import PromptLookup
from models.drafts.batched_proposer import Turn
from models.drafts.sampling import GREEDY
from models.drafts.trees import NO_PROPOSAL

NOTHING = torch.empty(0, 0)


def proposed(text: list[int], lookahead: int, proposer: CopyingProposer | None = None) -> list[int]:
    """The chain that follows a text."""
    turns = {0: Turn(text, NOTHING, lookahead, GREEDY)}
    return (proposer or PromptLookup().proposers(1)).propose(turns)[0].proposals.tokens.tolist()


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
    assert torch.equal(source.rollout(torch.tensor(text), NOTHING, lookahead, len(text) // 2), rows[len(text) // 2 :])
    proposer = source.proposers(1)
    for row in range(0, len(text) - 1, 3):
        expected = [token for token in rows[row].tolist() if token != NO_PROPOSAL]
        assert proposed(text[: row + 2], lookahead, proposer) == expected


def test_longest_match_then_most_recent():
    text = [1, 2, 3, 4, 9, 2, 3, 5, 8, 3, 6, 1, 2, 3]
    assert proposed(text, 2) == [4, 9]
    assert proposed([*text[1:-3], 7, 2, 3], 1) == [5]


def test_a_loop_is_followed_for_the_whole_lookahead():
    assert proposed([5, 1, 2, 1, 2, 1], 6) == [2, 1, 2, 1, 2, 1]


def test_nothing_repeats_nothing_is_proposed():
    assert proposed([1, 2, 3], 3) == []


def test_the_texts_of_a_batch_do_not_mix():
    batch = PromptLookup().proposers(3)
    batch.propose({row: Turn([row, row, row], NOTHING, 1, GREEDY) for row in range(3)})
    batch.only([0, 2])
    assert proposed([0, 0, 0, 7, 0], 2, batch) == [7, 0]
    tree = batch.propose({1: Turn([2, 2, 2, 8, 2], NOTHING, 2, GREEDY)})[1]
    assert tree.proposals.tokens.tolist() == [8, 2]
