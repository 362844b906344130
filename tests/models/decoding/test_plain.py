from collections import Counter

import torch

from models.decoding.continuations import continue_batch
from models.decoding.plain import continue_greedily, prefill
from models.drafts.sampling import Sampling
from models.targets.model import TargetModel

NEVER = frozenset()


def slow_greedy(target: TargetModel, prompt: list[int], count: int, eos: frozenset[int]) -> list[int]:
    """Without a cache: one full forward per token."""
    text = list(prompt)
    while len(text) < len(prompt) + count and (len(text) == len(prompt) or text[-1] not in eos):
        states = target.forward(torch.tensor([text]))
        text.append(int(target.logits(states.last[0, -1:]).argmax()))
    return text[len(prompt) :]


def test_cached_greedy_text_equals_full_forwards(llama, prompts):
    target = llama(1)
    for prompt in prompts:
        own = slow_greedy(target, prompt, 24, NEVER)
        assert continue_greedily(target, prompt, 24, NEVER) == own
    assert len(set(own)) > 8, "the text must vary, or equality proves little"


def test_sliding_window_text_beyond_the_window(gemma, prompts):
    for prompt in prompts[:4]:
        assert continue_greedily(gemma, prompt, 24, NEVER) == slow_greedy(gemma, prompt, 24, NEVER)


def test_the_window_is_at_work(gemma):
    """The first layer slides over 8 tokens: what lies further back leaves its output unchanged."""
    text = torch.arange(30)[None]
    changed = text.clone()
    changed[0, 10] = 60
    difference = (gemma.forward(text).aux - gemma.forward(changed).aux)[0, :, :32].abs().amax(-1)
    assert (difference[10:18] > 1e-3).all()
    assert (difference[18:] == 0).all()


def test_batched_ragged_greedy_equals_batch_one(llama, gemma, prompts):
    for target in (llama(1), gemma):
        for eos in (NEVER, frozenset({continue_greedily(target, prompts[0], 6, NEVER)[3], 4, 9})):
            single = [continue_greedily(target, prompt, 20, eos) for prompt in prompts]
            for batch_size in (1, 3, 16):
                assert continue_batch(target, prompts, 20, eos, batch_size=batch_size) == single
    assert any(len(text) < 20 for text in single), "some text must end early"


def test_end_of_text_is_kept_and_last(llama, prompts):
    target = llama(2)
    own = continue_greedily(target, prompts[0], 20, NEVER)
    eos = frozenset({own[5]})
    expected = own[: own.index(own[5]) + 1]
    assert continue_greedily(target, prompts[0], 20, eos) == expected


def test_progress_counts_every_prompt(llama, prompts):
    finished: list[int] = []
    continue_batch(llama(1), prompts, 4, NEVER, batch_size=3, advance=finished.append)
    assert sum(finished) == len(prompts)


def test_sampled_first_tokens_follow_the_target(llama, prompts):
    target, draws = llama(3), 4000
    states = target.forward(torch.tensor([prompts[0]]))
    for temperature in (1.0, 4.0):
        expected = (target.logits(states.last[0, -1:])[0] / temperature).softmax(-1)
        generator = torch.Generator().manual_seed(3)
        texts = continue_batch(
            target, [prompts[0]] * draws, 1, NEVER, Sampling(temperature, generator=generator), batch_size=draws
        )
        seen = Counter(text[0] for text in texts)
        frequencies = torch.tensor([seen[token] / draws for token in range(len(expected))])
        # Total variation of 4,000 draws over 61 tokens is about sqrt(61 / 4000) / 2 at most.
        assert (frequencies - expected).abs().sum() / 2 < 0.09
    assert len(seen) > 20


def test_top_p_leaves_out_what_is_unlikely(llama, prompts):
    target, sampling = llama(3), Sampling(4.0, 0.6)
    allowed = sampling.distribution(target.logits(target.forward(torch.tensor([prompts[0]])).last[0, -1:]))[0] > 0
    generator = torch.Generator().manual_seed(3)
    texts = continue_batch(target, [prompts[0]] * 2000, 1, NEVER, Sampling(4.0, 0.6, generator), batch_size=2000)
    assert {text[0] for text in texts} == set(allowed.nonzero()[:, 0].tolist())
    assert 3 < allowed.sum() < 55


def test_prefill_gives_features_of_the_prompt(llama, prompts):
    target = llama(1)
    start = prefill(target, prompts[0])
    full = target.forward(torch.tensor([prompts[0]])).aux[0]
    assert start.aux.shape == (len(prompts[0]), 64)
    assert torch.equal(start.aux, full)
