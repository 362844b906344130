import torch
from text_by_text import TextByText

from models.decoding.acceptance import AcceptedCounts
from models.decoding.simulated import simulate


class Fixed(TextByText):
    """Proposes from a table: row i stands for `tokens[: i + 2]`."""

    def __init__(self, rows: list[list[int]]):
        self.rows = torch.tensor(rows)

    def rollout(self, tokens, aux, lookahead, first=0):
        assert first == 1, "of a prompt of two tokens nothing is proposed"
        return self.rows[first:, :lookahead]


def test_by_hand():
    # Prompt 10 11, continuation 20 21 22 23 24 25 26 27. Row i proposes for positions i + 2, i + 3, i + 4.
    rows = [
        [0, 0, 0],  # inside the prompt: never used
        [21, 22, 0],  # after 20: two accepted, 23 corrects
        [0, 0, 0],
        [0, 0, 0],
        [0, 25, 26],  # after 23: the first is wrong, so nothing counts; 24 corrects
        [25, 26, 27],  # after 24: all accepted, the text ends before the bonus token: cut
        [0, 0, 0],
        [0, 0, 0],
        [0, 0, 0],
    ]
    prompt, continuation = [10, 11], [20, 21, 22, 23, 24, 25, 26, 27]
    one, two, three = simulate(Fixed(rows), prompt, continuation, torch.empty(9, 0), 3, eos_ids=frozenset())
    assert three == AcceptedCounts(3, (2, 0), cut=1)
    assert (three.tokens, three.steps) == (4, 2)
    assert [three.at_position(place) for place in (1, 2, 3)] == [(1, 2), (1, 1), (0, 1)]
    # Lookahead 2: after 20 two accepted + 23; 23 none + 24; 24 two accepted + 27.
    assert two == AcceptedCounts(2, (2, 0, 2))
    assert [two.at_position(place) for place in (1, 2)] == [(2, 3), (2, 2)]
    # Lookahead 1: after 20 one + 22; after 22 none + 23; after 23 none + 24; after 24 one + 26; after 26 none + 27.
    assert one == AcceptedCounts(1, (1, 0, 0, 1, 0))
    # Where 27 ends the text, the last step of lookahead 3 emits three tokens, and 27 closes the other two as before.
    ended = simulate(Fixed(rows), prompt, continuation, torch.empty(9, 0), 3, eos_ids=frozenset({27}))
    assert ended == (one, two, AcceptedCounts(3, (2, 0), ended=3))
    assert (ended[2].tokens, ended[2].steps) == (7, 3)
    assert [ended[2].at_position(place) for place in (1, 2, 3)] == [(2, 3), (2, 2), (1, 2)]
    assert ended[2].as_served(7) == (7, 3)


def test_a_text_of_one_token_has_no_steps():
    assert simulate(Fixed([[0, 0]]), [1], [2], torch.empty(1, 0), 2, eos_ids=frozenset({2})) == (
        AcceptedCounts(1, ()),
        AcceptedCounts(2, ()),
    )
