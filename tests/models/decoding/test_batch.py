"""Many texts in one forward, chains and trees: each is what the target writes alone, and counted as alone."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.decoding.batch import TargetBatch
from models.decoding.continuations import continue_batch
from models.decoding.lossless import LosslessCheck, total
from models.decoding.plain import continue_greedily, prefill
from models.decoding.prompt_lookup import PromptLookup
from models.decoding.simulated import features, read_texts, simulate
from models.decoding.speculative import Conversation, decode_together, speculate, speculate_together
from models.decoding.stopwatch import Stopwatch
from models.decoding.suffix_decoding import SuffixDecoding
from models.decoding.token_recycling import TokenRecycling
from models.drafts.cache import LEAST
from models.drafts.sampling import GREEDY, Sampling
from models.drafts.trees import DynamicTree, Proposals, Tree
from models.targets.model import TargetModel

NEVER = frozenset()
SHAPES = [0, 1, 3, 5, DynamicTree(3, 3, 15), DynamicTree(2, 2, 6), DynamicTree(4, 3, 9)]


def ragged(count: int, seed: int = 11) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 20, (count,), generator=generator).tolist()
    return [torch.randint(61, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_equal_to_plain_decoding_at_every_batch_size(llama, gemma, oracle, kind, batch):
    """Every row with a shape of its own, so that chains of all lengths and trees share a forward."""
    target = gemma if kind == "gemma" else llama(3)
    source, prompts, ends, most = oracle(target, 0.3, 7), ragged(batch), frozenset({5, 17}), 20
    texts = [
        Conversation(
            target, source, prefill(target, prompt), SHAPES[(row + batch) % len(SHAPES)], most, ends, sampling=GREEDY
        )
        for row, prompt in enumerate(prompts)
    ]
    decode_together(texts)
    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        assert text.tokens == continue_greedily(target, prompt, most, ends)
        assert text.decoded() == speculate(target, source, prompt, SHAPES[(row + batch) % len(SHAPES)], most, ends)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10_000),
    error_share=st.sampled_from([0.0, 0.2, 0.5, 1.0]),
    batch=st.integers(1, 5),
    most=st.integers(1, 14),
    shape=st.one_of(
        st.integers(0, 6),
        st.builds(DynamicTree, st.integers(1, 4), st.integers(1, 4), st.integers(1, 12)),
    ),
    eos=st.sets(st.integers(0, 60), max_size=6),
)
def test_lossless_whatever_is_proposed(llama, oracle, *, seed, error_share, batch, most, shape, eos):
    target, ends, prompts = llama(seed), frozenset(eos), ragged(batch, seed)
    source = oracle(target, error_share, seed)
    for decoded, prompt in zip(speculate_together(target, source, prompts, shape, most, ends), prompts, strict=True):
        assert list(decoded.tokens) == continue_greedily(target, prompt, most, ends)
        whole = decoded.counts.tokens + 1 == len(decoded.tokens)
        cut = decoded.counts.cut and decoded.tokens[-1] not in ends
        assert whole or cut, "every token but the prefill's comes from a step that is counted"


@pytest.mark.parametrize("source", [PromptLookup(), TokenRecycling(), SuffixDecoding()])
def test_a_sampled_text_depends_on_its_own_generator_alone(llama, source):
    """Whatever it is decoded with, and however many proposals the others have."""
    target, prompts, most = llama(1, 16), [[token % 16 for token in prompt] for prompt in ragged(6)], 16

    def begin(row: int) -> Conversation:
        sampling = Sampling(1.0, 0.95, torch.Generator().manual_seed(row))
        start = prefill(target, prompts[row], sampling)
        return Conversation(target, source, start, row % 4, most, NEVER, sampling=sampling)

    together = [begin(row) for row in range(6)]
    decode_together(together)
    for row, text in enumerate(together):
        decode_together([alone := begin(row)])
        assert text.decoded() == alone.decoded()
    assert any(any(text.accepted) for text in together)


def test_trees_accept_more_than_chains(llama, oracle):
    """The right token often is not the first: a chain misses it, a tree does not."""
    target, prompts = llama(4), ragged(3)
    source = oracle(target, 0.1, 3)
    accepted = {
        shape: sum(sum(each.counts.accepted) for each in speculate_together(target, source, prompts, shape, 24, NEVER))
        for shape in (DynamicTree(3, 1, 3), DynamicTree(3, 3, 21))
    }
    narrow, wide = accepted.values()
    assert wide > 40
    assert wide >= narrow


def test_features_handed_over_are_those_of_the_text(llama, oracle):
    """In a batch of trees too, every proposer sees each position of its own text once, in order."""
    target, prompts = llama(4), ragged(4)
    seen: list[list[torch.Tensor]] = []

    class Listening(oracle):
        def proposer(self):
            seen.append(heard := [])
            outer = self

            class Proposer:
                def propose_tree(self, sequence, aux, shape, sampling):
                    heard.append(aux)
                    assert sum(map(len, heard)) == len(sequence) - 1
                    return outer.propose_tree(sequence, aux, shape, sampling)

            return Proposer()

    shape = DynamicTree(2, 3, 9)
    for decoded, prompt, heard in zip(
        speculate_together(target, Listening(target, 0.3, 2), prompts, shape, 16, NEVER), prompts, seen, strict=True
    ):
        rows, full = torch.cat(heard), features(target, [*prompt, *decoded.tokens])
        assert torch.allclose(rows, full[: len(rows)], atol=1e-4)


def test_kept_columns_are_those_of_a_plain_cache(gemma):
    """After ragged acceptance each row's keys and values are what the text alone would have left."""
    prompts = ragged(3)
    starts = [prefill(gemma, prompt) for prompt in prompts]
    batch = TargetBatch(gemma, starts)
    tree = Tree(Proposals(torch.tensor([4, 9, 2, 7]), None), (-1, -1, 1, 1))
    chain, nothing = (
        Tree.chain(Proposals(torch.tensor([8, 3]), None)),
        Tree(Proposals(torch.tensor([], dtype=torch.long), None), ()),
    )
    trees, paths = [tree, chain, nothing], [[0, 2, 4], [0, 1], [0]]
    tokens, placement = batch.place([start.token for start in starts], trees)
    batch.verify(tokens, placement, trees)
    batch.keep(paths)
    texts = [
        [*prompt, *([start.token, *each.proposals.tokens.tolist()][column] for column in path)]
        for prompt, start, each, path in zip(prompts, starts, trees, paths, strict=True)
    ]
    assert batch.lengths == [len(text) for text in texts]
    batch.only([0, 2])
    for row, text in enumerate([texts[0], texts[2]]):
        plain = prefill(gemma, text).cache
        for layer, own in zip(batch.layers, plain.layers, strict=True):
            assert torch.allclose(layer.stored.keys[row, :, : len(text)], own.keys[0], atol=1e-4)
            assert torch.allclose(layer.stored.values[row, :, : len(text)], own.values[0], atol=1e-4)


def test_a_cache_holds_little_more_than_its_texts(llama):
    starts = [prefill(llama(3), [row] * 400) for row in range(2)]
    batch, nothing = TargetBatch(llama(3), starts), Tree(Proposals(torch.empty(0, dtype=torch.long), None), ())
    for _ in range(200):
        batch.verify(*batch.place([1, 2], [nothing] * 2), [nothing] * 2)
        batch.keep([(0,)] * 2)
        assert all(layer.stored.keys.shape[2] <= batch.lengths[0] + LEAST for layer in batch.layers)
    assert all(layer.keys is None for start in starts for layer in start.cache.layers), "nobody reads them any more"


def test_the_stopwatch_sees_every_part(llama):
    target, watch = llama(3), Stopwatch(torch.device("cpu"))
    found = speculate_together(target, TokenRecycling(), ragged(4), 3, 12, NEVER, watch=watch)
    forwards = [decoded.counts.steps + decoded.counts.cut for decoded in found]
    assert len(watch.steps) == max(forwards)
    assert sum(step.emitted for step in watch.steps) == sum(len(decoded.tokens) - 1 for decoded in found)
    assert sum(step.texts for step in watch.steps) == sum(forwards)
    assert {step.tokens for step in watch.steps} <= {1, 2, 3, 4}
    assert min(seconds for step in watch.steps for seconds in step.seconds.values()) > 0


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_the_tiny_target(tiny_target, batch):
    """Text that the training-free sources do get right; compared as the lossless check compares, counted as walked."""
    target = TargetModel.load(Path(tiny_target.path), [0, 1, 2], torch.float32)
    generator, most, ends = torch.Generator().manual_seed(3), 24, frozenset({1})
    lengths = torch.randint(3, 24, (batch,), generator=generator).tolist()
    prompts = [torch.randint(2, 1024, (length,), generator=generator).tolist() for length in lengths]
    plain = continue_batch(target, prompts, most, ends)
    check = LosslessCheck(target, lambda: target, most, ends)
    for source in (PromptLookup(), SuffixDecoding(), TokenRecycling()):
        found = speculate_together(target, source, prompts, 4, most, ends)
        compared = [check.compare(p, d.tokens, own) for p, d, own in zip(prompts, found, plain, strict=True)]
        assert (total(compared).mismatches, total(compared).ties) == (0, 0)
        assert sum(sum(decoded.counts.accepted) for decoded in found) > batch
        for prompt, decoded in zip(prompts, found, strict=True):
            (read,) = read_texts(target, [[*prompt, *decoded.tokens]], candidates=1)
            walked = simulate(source, prompt, decoded.tokens, read.aux, 4, read.likeliest, eos_ids=ends)
            assert decoded.counts == walked[-1]
