import pytest
import torch

from models.data.prompts import take_prompts

REMEDY = "add prompts"


def sample(length: int, first: int, start: int = 0):
    mask = torch.zeros(length, dtype=torch.bool)
    mask[first:] = True
    return torch.arange(start, start + length), mask


def test_plain_text_gives_its_beginning_but_at_most_half():
    long, short = sample(200, 0), sample(20, 1, start=500)
    assert take_prompts([long, short], 5, 64, REMEDY) == [list(range(64)), list(range(500, 510))]


def test_a_conversation_gives_what_precedes_the_answer():
    kept, too_long = sample(100, 30), sample(100, 65, start=300)
    other = sample(100, 64, start=600)
    assert take_prompts([kept, too_long, other], 5, 64, REMEDY) == [list(range(30)), list(range(600, 664))]


def test_count_and_repeats():
    samples = [sample(10, 0), sample(10, 0), sample(10, 0, start=50), sample(10, 0, start=90)]
    assert take_prompts(samples, 2, 64, REMEDY) == [[0, 1, 2, 3, 4], [50, 51, 52, 53, 54]]


def test_too_few_prompts_are_refused():
    with pytest.raises(ValueError, match=f"1 of 2 samples .*, and at least two are needed: {REMEDY}"):
        take_prompts([sample(10, 0), sample(100, 70)], 5, 64, REMEDY)
