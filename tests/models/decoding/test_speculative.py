import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from text_by_text import TextByText

from models.decoding.acceptance import AcceptedCounts
from models.decoding.continuations import continue_batch
from models.decoding.plain import continue_greedily
from models.decoding.prompt_lookup import PromptLookup
from models.decoding.simulated import features, read_texts, simulate
from models.decoding.speculative import speculate, speculate_together
from models.decoding.suffix_decoding import SuffixDecoding
from models.decoding.token_recycling import TokenRecycling
from models.drafts.sampling import Sampling
from models.drafts.trees import NO_PROPOSAL

NEVER = frozenset()


class Scripted(TextByText):
    """Proposes from a fixed continuation, changed at chosen places of it."""

    def __init__(self, prompt_length: int, continuation: list[int], wrong: set[int]):
        self.prompt_length, self.wrong = prompt_length, wrong
        self.script = [(token + 1) % 61 if place in wrong else token for place, token in enumerate(continuation)]

    def proposer(self) -> "Scripted":
        return self

    def propose(self, sequence, aux, lookahead):
        place = len(sequence) - self.prompt_length
        found = self.script[place : place + lookahead]
        return torch.tensor(found + [NO_PROPOSAL] * (lookahead - len(found)))

    def rollout(self, tokens, aux, lookahead, first=0):
        return torch.stack([self.propose(tokens[: row + 2], aux, lookahead) for row in range(first, len(tokens) - 1)])


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10_000),
    error_share=st.sampled_from([0.0, 0.15, 0.4, 1.0]),
    lookahead=st.integers(1, 6),
    lengths=st.tuples(st.integers(1, 15), st.integers(1, 24)),
    eos=st.sets(st.integers(0, 60), max_size=6),
)
def test_lossless_and_counts_as_simulated(llama, oracle, *, seed, error_share, lookahead, lengths, eos):
    (length, most), target, ends = lengths, llama(seed), frozenset(eos)
    prompt = torch.randint(61, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    own = continue_greedily(target, prompt, most, ends)
    (read,) = read_texts(target, [[*prompt, *own]], candidates=1)
    for source in (oracle(target, error_share, seed), PromptLookup(), TokenRecycling(), SuffixDecoding()):
        decoded = speculate(target, source, prompt, lookahead, most, ends)
        assert list(decoded.tokens) == own
        assert decoded.counts == simulate(source, prompt, own, read.aux, lookahead, read.likeliest, eos_ids=ends)[-1]
        # Near temperature 0 sampling has no choice: the rejection rule must agree.
        assert decoded == speculate(target, source, prompt, lookahead, most, ends, sampling=Sampling(1e-6))


def test_the_walk_over_sampled_text_accepts_as_often_as_real_decoding(llama):
    """What a source proposes with certainty is accepted as often as the simulated walk says."""
    target, source, most, draws = llama(1, 16), PromptLookup(), 14, 250
    generator, prompt = torch.Generator().manual_seed(1), [3, 9, 3, 1, 9]
    sampling = Sampling(1.0, 0.95, generator)
    together = speculate_together(target, source, [prompt] * draws, 2, most, NEVER, sampling=sampling)
    real = [decoded.counts for decoded in together]
    texts = continue_batch(target, [prompt] * draws, most, NEVER, Sampling(1.0, 0.95, generator), batch_size=draws)
    walked = [simulate(source, prompt, text, features(target, [*prompt, *text]), 2, eos_ids=NEVER)[1] for text in texts]
    shares, errors = zip(*(accepted_per_step(counts) for counts in (real, walked)), strict=True)
    assert abs(shares[0] - shares[1]) < 5 * (errors[0] ** 2 + errors[1] ** 2) ** 0.5
    assert shares[0] > 10 * errors[0], "something must be accepted, or nothing is compared"


def accepted_per_step(counts: list[AcceptedCounts]) -> tuple[float, float]:
    """A ratio of sums over conversations, and its standard error (linearised)."""
    rows = torch.tensor([[sum(count.accepted), count.steps] for count in counts]).double()
    share = rows[:, 0].sum() / rows[:, 1].sum()
    error = (rows[:, 0] - share * rows[:, 1]).std() / rows[:, 1].mean() / len(counts) ** 0.5
    return float(share), float(error)


def test_sliding_window_target_with_cropping(gemma, oracle, prompts):
    """Rejected proposals leave no trace in a cache that has passed the window."""
    for prompt in prompts[:3]:
        own = continue_greedily(gemma, prompt, 32, NEVER)
        decoded = speculate(gemma, oracle(gemma, 0.3, 1), prompt, 4, 32, NEVER)
        assert list(decoded.tokens) == own
        assert {0, 4} <= set(decoded.counts.accepted)


def test_features_handed_over_are_those_of_the_text(llama, oracle, prompts):
    """The proposer sees every position once, in order, as in one forward over the text."""
    target, seen = llama(4), []

    class Listening(oracle):
        def propose(self, sequence, aux, lookahead):
            seen.append(aux)
            assert sum(len(rows) for rows in seen) == len(sequence) - 1
            return super().propose(sequence, aux, lookahead)

    decoded = speculate(target, Listening(target, 0.3, 2), prompts[0], 3, 16, NEVER)
    rows = torch.cat(seen)
    full = features(target, [*prompts[0], *decoded.tokens])
    assert torch.allclose(rows, full[: len(rows)], atol=1e-4)


def test_a_perfect_source_reaches_lookahead_plus_one(llama, oracle, prompts):
    target = llama(5)
    decoded = speculate(target, oracle(target, 0.0, 0), prompts[0], 4, 16, NEVER)
    assert decoded.counts.accepted == (4, 4, 4)
    assert decoded.counts.cut == 0
    assert decoded.counts.tokens == 15


@pytest.mark.parametrize(
    ("most", "wrong", "accepted", "cut"),
    [
        (6, set(), (4,), 0),  # prefill token + 5: the bonus token is the last one allowed
        (5, set(), (), 1),  # the bonus token would be the sixth: cut
        (6, {3}, (2,), 1),  # correction at place 3, then two accepted and no room for what follows
        (6, {5}, (4,), 0),  # the wrong place is never proposed: the bonus token stands there
        (1, set(), (), 0),  # the prefill token is all there is
        (4, {1, 2, 3}, (0, 0, 0), 0),
    ],
)
def test_steps_cut_by_the_maximum_length(llama, prompts, most, wrong, accepted, cut):
    target = llama(6)
    longer = continue_greedily(target, prompts[0], 12, NEVER)
    source = Scripted(len(prompts[0]), longer, wrong)
    decoded = speculate(target, source, prompts[0], 4, most, NEVER)
    assert list(decoded.tokens) == longer[:most]
    assert (decoded.counts.accepted, decoded.counts.cut) == (accepted, cut)
    aux = features(target, [*prompts[0], *longer[:most]])
    assert simulate(source, prompts[0], longer[:most], aux, 4, eos_ids=NEVER)[3] == decoded.counts


@pytest.mark.parametrize(
    ("place", "wrong", "accepted", "ended"),
    [
        (2, set(), (), 2),  # accepted end of text: the step emits two tokens, and nothing closes it
        (5, set(), (4,), 0),  # end of text is the bonus token: the step is whole
        (2, {2}, (1,), 0),  # end of text is the correction
        (0, set(), (), 0),  # the text ends with the prefill token
    ],
)
def test_a_step_that_the_end_of_text_closes_counts_with_what_it_emitted(llama, prompts, place, wrong, accepted, ended):
    seed = next(s for s in range(100) if len(set(continue_greedily(llama(s), prompts[0], 8, NEVER))) == 8)
    target = llama(seed)
    longer = continue_greedily(target, prompts[0], 12, NEVER)
    eos = frozenset({longer[place]})
    source = Scripted(len(prompts[0]), longer, wrong)
    decoded = speculate(target, source, prompts[0], 4, 12, eos)
    assert list(decoded.tokens) == longer[: place + 1]
    assert (decoded.counts.accepted, decoded.counts.cut, decoded.counts.ended) == (accepted, 0, ended)
    assert decoded.counts.tokens == place
    # As the last token that the maximum length allows it is the end of the text all the same.
    assert speculate(target, source, prompts[0], 4, place + 1, eos) == decoded
    aux = features(target, [*prompts[0], *decoded.tokens])
    assert simulate(source, prompts[0], decoded.tokens, aux, 4, eos_ids=eos)[3] == decoded.counts


def test_nothing_proposed_is_plain_decoding(llama, oracle, prompts):
    target = llama(5)
    decoded = speculate(target, oracle(target, 0.0, 0), prompts[0], 0, 9, NEVER)
    assert list(decoded.tokens) == continue_greedily(target, prompts[0], 9, NEVER)
    assert decoded.counts.accepted == (0,) * 8


def test_what_cannot_be_decoded_is_refused_in_words(llama):
    target = llama(5)
    with pytest.raises(ValueError, match="0 proposes nothing"):
        speculate(target, PromptLookup(), [1], -1, 4, NEVER)
