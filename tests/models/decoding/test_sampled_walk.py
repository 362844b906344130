"""The walk over sampled text: its recursion by hand, and its law against real speculative sampling."""

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from models.benchmark.contestants import Contestants
from models.config.eagle3 import Eagle3Config
from models.decoding.acceptance import summarise
from models.decoding.sampled_walk import expected_counts, walk_sampled
from models.decoding.simulated import read_texts, simulate, walk_chain
from models.drafts.registry import build_draft
from models.drafts.sampling import Sampling
from models.drafts.vocabulary import DraftVocabulary

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "sampled_walk.py"
VOCABULARY, KNOWN, PROMPTS = 20, 16, [[3, 9, 1], [7]]
REJECTED = 1e-3


@pytest.fixture(scope="module")
def benchmark() -> Any:
    return SimpleNamespace(**runpy.run_path(str(BENCHMARK)))


@pytest.fixture(scope="module")
def loaded(llama) -> Contestants:
    """A quiet target, of which many texts have their chance, and an untrained draft that knows most of its tokens."""
    target = llama(21, VOCABULARY)
    torch.manual_seed(3)
    config = Eagle3Config(vocab_size=KNOWN, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=32, ttt_steps=2)
    vocabulary = DraftVocabulary(torch.arange(VOCABULARY - KNOWN, VOCABULARY), VOCABULARY)
    draft = build_draft(config, torch.randn(VOCABULARY, 32), vocabulary, (0, 1))
    with torch.no_grad():
        target.head_weight *= 0.3
        draft.start_from(target.head_weight)
    return Contestants(target, lambda: target, [draft], frozenset(), Sampling(1.0))


def test_by_hand():
    """A text of three tokens: half of all proposals are accepted, the last one always."""
    chances = [np.array([[0.5, 1.0], [1.0, 0.0]])]
    one, two = expected_counts(chances, 2, [False])[0]
    # Lookahead 1, from the first token: rejected (half), then the end is accepted and cuts; or accepted, and closed by
    # the end. Lookahead 2: rejected, then cut; or both accepted, and cut.
    assert (one.by_accepted, one.cut) == ((0.5, 0.5), 0.5)
    assert (two.by_accepted, two.cut) == ((0.5, 0.0, 0.0), 1.0)
    assert (one.steps, one.tokens) == (1.0, 1.5)
    assert one.at_position(1) == (0.5, 1.0)
    # Where the last token ends the text, the steps that accept it emit it, and are complete.
    one, two = expected_counts(chances, 2, [True])[0]
    assert (one.by_accepted, one.cut, one.ended) == ((0.5, 0.5), 0.0, (0.0, 0.5))
    assert (one.steps, one.tokens) == (1.5, 2.0)
    assert one.at_position(1) == (1.0, 1.5)
    assert (two.by_accepted, two.cut, two.ended) == ((0.5, 0.0, 0.0), 0.0, (0.0, 0.5, 0.5))
    assert two.tokens == 2.0
    assert two.at_position(2) == (0.5, 0.5)


def test_what_is_certain_is_walked_as_it_is_counted():
    rng = np.random.default_rng(1)
    texts = [rng.integers(0, 2, size=(rows, 4)).astype(float) for rows in (0, 1, 9, 30)]
    for text in texts:
        for row in range(len(text)):
            text[row, len(text) - row :] = 0
    for ended in (False, True):
        for text, walked in zip(texts, expected_counts(texts, 4, [ended] * 4), strict=True):
            agreeing = text.cumprod(axis=1).sum(axis=1).astype(int).tolist()
            for lookahead, counts in enumerate(walked, 1):
                own = walk_chain(agreeing, lookahead, ended=ended)
                assert (counts.steps, counts.tokens, counts.cut) == (own.steps, own.tokens, own.cut)
                assert [counts.at_position(at) for at in (1, 4)] == [own.at_position(at) for at in (1, 4)]


def test_chances_are_followed_as_draws_are():
    """The expectation is the mean of walks whose acceptances are drawn."""
    rng = np.random.default_rng(2)
    chances = rng.random((12, 3))
    for row in range(12):
        chances[row, 12 - row :] = 0
    drawn = [expected_counts([(rng.random((12, 3)) < chances).astype(float)], 3, [False])[0][2] for _ in range(4000)]
    (expected,) = (walked[2] for walked in expected_counts([chances], 3, [False]))
    mean = np.mean([counts.by_accepted for counts in drawn], axis=0)
    assert np.abs(mean - expected.by_accepted).max() < 0.06
    assert expected.tokens + expected.cut * 3 >= 12 - 3


def test_greedy_proposals_are_counted_as_by_the_rollout(loaded):
    """At any batch: ragged texts, one of a single token."""
    sampling, draft = Sampling(0.8, 0.9, torch.Generator().manual_seed(4)), loaded.draft
    texts = [
        ([3, 9, 1], [5]),
        ([7], torch.randint(VOCABULARY, (20,)).tolist()),
        ([1, 2], torch.randint(VOCABULARY, (9,)).tolist()),
    ]
    whole, sampled = [[*prompt, *text] for prompt, text in texts], [len(text) - 1 for _, text in texts]
    readings = read_texts(loaded.target, whole, sampled=sampled, sampling=sampling)
    # One of the texts ends.
    ends = frozenset({texts[1][1][-1]})
    together = walk_sampled(draft, readings, 5, sampling, eos_ids=ends)
    for (prompt, text), reading, walked in zip(texts, readings, together, strict=True):
        assert walked.greedy == simulate(draft, prompt, text, reading.aux, 5, eos_ids=ends)
        (alone,) = walk_sampled(draft, [reading], 5, sampling, eos_ids=ends)
        for mine, other in zip(walked.drawn, alone.drawn, strict=True):
            assert mine.by_accepted == pytest.approx(other.by_accepted, abs=1e-5)
    assert summarise([walked.drawn for walked in together]).length[5] > 1


@pytest.mark.slow
@pytest.mark.parametrize("law", [(0.7, 0.9), pytest.param((1.0, 1.0), marks=pytest.mark.long)])
def test_the_walk_is_real_sampled_decoding_in_law(benchmark, loaded, law):
    """Acceptance by position at several lookaheads, by both rules; walks by a wrong ratio are rejected."""
    setting = benchmark.Setting(loaded, PROMPTS, Sampling(law[0], law[1], torch.Generator().manual_seed(5)), 20, 100)
    walked, wrong = setting.walk(200), []
    for ratio in benchmark.WRONG.values():
        with benchmark.deciding_by(ratio):
            wrong.append(setting.walk(200)["drawn"])
    for rule in benchmark.RULES:
        for lookahead in (1, 4, 7):
            real = setting.decode(rule, lookahead, 3000)
            own = walked[rule][lookahead - 1]
            assert benchmark.p_value(real, own) > REJECTED, (rule, lookahead)
            if rule == "drawn":
                assert all(benchmark.p_value(real, of[lookahead - 1]) < REJECTED for of in wrong), lookahead
