import copy

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.decoding.lossless import LosslessCheck, total
from models.decoding.plain import continue_greedily
from models.targets.model import TargetModel

NEVER = frozenset()


@pytest.fixture
def twins(llama):
    """A target whose tokens 7 and 8 have the same logits up to 4e-4, and a prompt after which 7 is greatest."""
    target = llama(8)
    with torch.no_grad():
        target.head_weight[8] = target.head_weight[7]
    for seed in range(200):
        prompt = torch.randint(61, (6,), generator=torch.Generator().manual_seed(seed)).tolist()
        text = continue_greedily(target, prompt, 12, NEVER)
        if 7 in text[:6]:
            return target, prompt, text
    raise AssertionError("no prompt leads to token 7")


def check(target: TargetModel, most: int = 12, eos: frozenset[int] = NEVER) -> LosslessCheck:
    return LosslessCheck(target, lambda: target, most, eos)


def test_equal_texts(llama, prompts):
    target = llama(1)
    text = continue_greedily(target, prompts[0], 12, NEVER)
    result = check(target).compare(prompts[0], text, text)
    assert (result.tokens, result.ties, result.mismatches) == (12, 0, 0)


def test_a_tie_is_a_tie_and_comparison_goes_on(twins):
    target, prompt, text = twins
    place = text.index(7)
    rest = continue_greedily(target, [*prompt, *text[:place], 8], 11 - place, NEVER)
    result = check(target).compare(prompt, [*text[:place], 8, *rest], text)
    assert (result.tokens, result.ties, result.mismatches) == (12, 1, 0)
    assert result.divergences[0].position == place
    assert result.divergences[0].gap <= 1e-3


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 11), shift=st.integers(1, 60))
def test_a_wrong_token_is_one_mismatch(llama, place, shift):
    target, prompt = llama(1), [3, 1, 4]
    text = continue_greedily(target, prompt, 12, NEVER)
    wrong = [*text[:place], (text[place] + shift) % 61]
    wrong += continue_greedily(target, [*prompt, *wrong], 11 - place, NEVER) if place < 11 else []
    result = check(target).compare(prompt, wrong, text)
    assert (result.tokens, result.ties, result.mismatches) == (12, 0, 1)


def test_every_mismatch_is_counted(llama):
    """Two wrong tokens in one text: the first does not hide the second."""
    target, prompt = llama(1), [3, 1, 4]
    text = continue_greedily(target, prompt, 4, NEVER)
    text[3] = (text[3] + 1) % 61
    text += continue_greedily(target, [*prompt, *text], 4, NEVER)
    text[7] = (text[7] + 1) % 61
    text += continue_greedily(target, [*prompt, *text], 4, NEVER)
    own = continue_greedily(target, prompt, 12, NEVER)
    assert [found.position for found in check(target).compare(prompt, text, own).divergences] == [3, 7]


def test_stopping_early_and_running_on_are_mismatches(llama):
    target, prompt = llama(1), [3, 1, 4]
    text = continue_greedily(target, prompt, 12, NEVER)
    assert check(target).compare(prompt, text[:9], text).mismatches == 1
    eos = frozenset({text[5]})
    own = continue_greedily(target, prompt, 12, eos)
    assert len(own) < 12
    assert check(target, eos=eos).compare(prompt, text, own).mismatches == 1


def test_bfloat16_has_its_own_delta(llama):
    """A bfloat16 target parts from the float32 one at a tie; a token that is plainly wrong is still a mismatch."""
    exact = llama(1)
    rough = TargetModel(copy.deepcopy(exact.model).to(torch.bfloat16), [0, 1])
    checker = LosslessCheck(rough, lambda: exact, 12, NEVER)
    ties = []
    for token in range(40):
        true = continue_greedily(exact, [token], 12, NEVER)
        result = checker.compare([token], true, continue_greedily(rough, [token], 12, NEVER))
        assert result.mismatches == 0
        ties += result.divergences
    assert ties, "bfloat16 and float32 must part somewhere here, or nothing is tested"
    assert all(tie.delta > 1e-3 for tie in ties)
    least = int(exact.logits(exact.forward(torch.tensor([[3, *true[:5]]])).last[0, -1:]).argmin())
    own = continue_greedily(rough, [3], 12, NEVER)
    worst = [*own[:5], least]
    worst += continue_greedily(rough, [3, *worst], 6, NEVER)
    assert checker.compare([3], worst, own).mismatches == 1


def test_total_adds_up(llama):
    target, prompt = llama(1), [3, 1, 4]
    text = continue_greedily(target, prompt, 12, NEVER)
    wrong = [*text[:11], (text[11] + 1) % 61]
    both = total([check(target).compare(prompt, text, text), check(target).compare(prompt, wrong, text)])
    assert (both.tokens, both.ties, both.mismatches) == (24, 0, 1)
