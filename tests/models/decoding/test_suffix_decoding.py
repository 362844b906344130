from collections import Counter

import torch
from hypothesis import given
from hypothesis import strategies as st

from models.decoding import suffix_decoding
from models.decoding.suffix_decoding import DEPTH, FACTOR, LEAST_SHARE, SuffixDecoding
from models.drafts.batched_proposer import Turn
from models.drafts.sampling import GREEDY
from models.drafts.trees import NO_PROPOSAL

NOTHING = torch.empty(0, 0)


class SlowTree:
    """A suffix tree of depth `DEPTH` as a table: how often each sequence of tokens stands in the texts."""

    def __init__(self, texts: list[list[int]]):
        self.counts, self.newest, place = Counter[tuple[int, ...]](), dict[tuple[int, ...], int](), 0
        for text in texts:
            for first in range(len(text)):
                for end in range(first + 1, min(first + DEPTH, len(text)) + 1):
                    self.counts[tuple(text[first:end])] += 1
                    self.newest[tuple(text[first:end])] = place + end
            place += len(text) + 1

    def chain(self, match: tuple[int, ...]) -> tuple[float, list[int]]:
        """By the words of the paper: the most frequent child, again and again."""
        here, share, score = match, 1.0, 0.0
        while len(here) - len(match) < FACTOR * len(match) and len(here) < DEPTH:
            children = [each for each in self.counts if len(each) == len(here) + 1 and each[:-1] == here]
            if not children:
                break
            here = max(children, key=lambda each: (self.counts[each], self.newest[each]))
            share *= self.counts[here] / sum(self.counts[each] for each in children)
            if share < LEAST_SHARE:
                return score, list(here[len(match) : -1])
            score += share
        return score, list(here[len(match) :])


def slow_proposal(text: list[int], log: list[list[int]]) -> list[int]:
    best: tuple[float, list[int]] = (0.0, [])
    for tree in (SlowTree([text]), SlowTree(log)):
        for length in range(min(DEPTH - 1, len(text)), 0, -1):
            found = tree.chain(tuple(text[-length:]))
            if found[0] > best[0]:
                best = found
    return best[1]


def texts(most: int):
    return st.integers(1, 4).flatmap(lambda kinds: st.lists(st.integers(0, kinds), min_size=2, max_size=most))


@given(text=texts(30), log=st.lists(texts(20), max_size=3), lookahead=st.integers(1, 9))
def test_rollout_equals_a_slow_tree_and_equals_the_proposer(text, log, lookahead):
    source = SuffixDecoding(log)
    rows = source.rollout(torch.tensor(text), torch.empty(len(text) - 1, 0), lookahead).tolist()
    slow = [slow_proposal(text[: row + 2], log)[:lookahead] for row in range(len(text) - 1)]
    assert rows == [each + [NO_PROPOSAL] * (lookahead - len(each)) for each in slow]
    assert source.rollout(torch.tensor(text), NOTHING, lookahead, len(text) // 2).tolist() == rows[len(text) // 2 :]
    proposer = source.proposers(1)
    for row in range(0, len(text) - 1, 3):
        turn = Turn(text[: row + 2], NOTHING, lookahead, GREEDY)
        assert proposer.propose({0: turn})[0].proposals.tokens.tolist() == slow[row]


def test_a_longer_match_proposes_more_up_to_the_depth():
    text = list(range(100, 160))
    for matched in (1, 2, 5, 12, 20, 23):
        found = SuffixDecoding([text]).rollout(torch.tensor([0, *text[:matched]]), NOTHING, 16)[-1].tolist()
        length = min(matched, DEPTH // 2)  # a match of 12 leaves room for 12 tokens, one of 20 only for 4
        assert found == text[matched : matched + length] + [NO_PROPOSAL] * (16 - length)


def test_the_more_frequent_continuation_wins_then_the_more_recent():
    log = [[1, 2, 7], [1, 2, 8], [1, 2, 7], [1, 2, 9]]
    assert SuffixDecoding(log).rollout(torch.tensor([1, 2]), NOTHING, 1).tolist() == [[7]]
    assert SuffixDecoding(log[1:]).rollout(torch.tensor([1, 2]), NOTHING, 1).tolist() == [[9]]


def test_the_log_keeps_its_newest_tokens(monkeypatch):
    monkeypatch.setattr(suffix_decoding, "LOG_TOKENS", 6)
    source = SuffixDecoding([[1, 2, 3], [4, 5], [6, 7]])
    assert source.log.tokens == [4, 5, NO_PROPOSAL, 6, 7, NO_PROPOSAL]


def test_the_texts_of_a_batch_do_not_mix():
    batch = SuffixDecoding().proposers(3)
    batch.propose({row: Turn([row, row], NOTHING, 1, GREEDY) for row in range(3)})
    batch.only([0, 2])
    tree = batch.propose({1: Turn([2, 2, 8, 2], NOTHING, 2, GREEDY)})[1]
    assert tree.proposals.tokens.tolist() == [8]
