"""Sampled speculative text follows the target: three tokens' joint distribution against exact enumeration.

What is drawn is the decoder's own text: `Conversation` and `decode_together` are all that `speculate` consists of
after the prefills, run with thousands of conversations where that has one. The target is a real one whose forwards were
computed in advance for every text that can occur. It reads those texts out of the decoder's own cache and masks, so
rows that are realigned wrongly would write something else; the last tests run the same draws with the real target.
"""

import gc
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from text_by_text import Rows, TextByText, grown
from torch import Tensor
from transformers import DynamicCache

from infra.records.goodput import CostFit
from models.config.draft import parse_draft_config
from models.decoding import rejection
from models.decoding.goodput import TERMS, FittedCosts
from models.decoding.plain import Prefill
from models.decoding.speculative import Conversation, decode_together, speculate
from models.drafts.base import Draft
from models.drafts.batched_proposer import ProposalSource
from models.drafts.registry import build_draft
from models.drafts.sampling import Sampling
from models.drafts.trees import DynamicTree, Proposals, Tree
from models.drafts.vocabulary import DraftVocabulary

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

from scheduled_verification import Schedule, Scheduled, admitted

from models.targets.hidden_states import HiddenStates
from models.targets.model import TargetModel

VOCABULARY, PROMPT = 16, (3, 9, 1)
DEPTH = 4
"""Two tokens and two proposals after them: the longest text before the third token is there."""
DRAWS, FEWER, TOGETHER = 100_000, 20_000, 5_000
REJECTED = 1e-4
NEVER: frozenset[int] = frozenset()
ALL, NUCLEUS = (1.0, 1.0), (0.7, 0.8)


class Remembering(TargetModel):
    """A target that went through every continuation of `PROMPT` by `DEPTH` tokens; its `last` are already logits."""

    rewinds = True

    def __init__(self, target: TargetModel):
        self.head_weight = target.head_weight
        codes = torch.arange(VOCABULARY**DEPTH)
        digits = torch.stack([codes // VOCABULARY**place % VOCABULARY for place in reversed(range(DEPTH))], dim=1)
        texts = torch.cat([torch.tensor(PROMPT).expand(len(codes), -1), digits], dim=1)
        last = [target.forward(part).last.flatten(0, 1) for part in texts.split(8192)]
        self.known = torch.cat([target.logits(part) for part in last]).unflatten(0, texts.shape)

    def new_cache(self):
        return DynamicCache()

    def forward(self, tokens, cache=None, placement=None):
        columns = torch.arange(cache.get_seq_length() + tokens.shape[1])
        positions = placement.positions if placement else columns[-tokens.shape[1] :].expand_as(tokens)
        visible = placement.visible if placement else (columns <= positions.unsqueeze(-1))
        assert bool((visible.sum(-1) == positions + 1).all()), "a text has as many tokens as the place it ends at"
        stored = cache.update(tokens[:, None, :, None], positions[:, None, :, None], 0)
        written, at = (part[:, 0, :, 0] for part in stored)
        # Digits of the text's number, most significant first; the prompt is none of them.
        digits = written * VOCABULARY ** (DEPTH - 1 + len(PROMPT) - at).clamp(min=0) * (at >= len(PROMPT))
        codes = (visible * digits.unsqueeze(1)).sum(-1)
        known = self.known[codes, positions]
        return HiddenStates(known, known)  # the drafts here read no features, but count them

    def logits(self, last):
        return last

    def law(self, temperature: float, top_p: float) -> Tensor:
        """`[V, V, V]` float64: the probability of every three tokens after the prompt."""
        first, second, third = (nucleus(self.after(written), temperature, top_p) for written in range(3))
        return first[:, None, None] * second[:, :, None] * third

    def after(self, written: int) -> Tensor:
        """Logits after every text of `length` tokens, `[V, ..., V]`."""
        places = [VOCABULARY] * written
        return self.known[:, len(PROMPT) - 1 + written].view(*places, -1, VOCABULARY).select(written, 0)


def nucleus(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """A token stays if those that are likelier do not reach top-p; written as a count over all pairs."""
    shares = (logits.double() / temperature).softmax(-1)
    likelier = (shares[..., None, :] > shares[..., :, None]) * shares[..., None, :]
    kept = shares * (likelier.sum(-1) < top_p)
    return kept / kept.sum(-1, keepdim=True)


class Disagreeing(TextByText):
    """A draft that knows the last two tokens only, 11 of the 16 tokens, and what it knows is noisy."""

    def __init__(self, target: Remembering):
        generator = torch.Generator().manual_seed(5)
        self.ids = torch.randperm(VOCABULARY, generator=generator)[:11].sort().values
        known = target.after(2)[..., self.ids]
        self.logits = known + 0.7 * torch.randn(known.shape, generator=generator)
        self.waiting: dict[tuple[int, ...], Iterator[tuple[Tensor, Tensor]]] = {}

    def proposer(self):
        return self

    def sample(self, sequence, aux, lookahead, sampling):
        place = (*sequence[-2:].tolist(), lookahead)
        found = next(self.waiting.get(place, iter(())), None)
        if found is None:
            self.waiting[place] = self.chains(place[:2], lookahead, sampling)
            found = next(self.waiting[place])
        return Proposals(*found)

    def chains(self, last: tuple[int, int], lookahead: int, sampling: Sampling) -> Iterator[tuple[Tensor, Tensor]]:
        """Many chains that start after the same two tokens, drawn at once."""
        before, here = (torch.full((512,), token) for token in last)
        tokens, drawn_from = [], []
        for _ in range(lookahead):
            q = sampling.drafted(self.logits[before, here])
            before, here = here, self.ids[sampling.draw(q)]
            tokens.append(here)
            drawn_from.append(q.new_zeros(512, VOCABULARY).index_copy(1, self.ids, q))
        return zip(torch.stack(tokens, 1).unbind(), torch.stack(drawn_from, 1).unbind(), strict=True)


class Branching(Disagreeing):
    """Grows trees of its likeliest tokens; they are known in advance."""

    def propose_tree(self, sequence, aux, shape, sampling):
        place = (*sequence[-2:].tolist(), shape)
        if place not in self.waiting:
            self.waiting[place] = self.tree(sequence[-2:], shape, sampling)
        return self.waiting[place]

    def tree(self, last: Tensor, shape: DynamicTree, sampling: Sampling) -> Tree:
        return grown(shape, last, lambda texts: self.logits[texts[:, -2], texts[:, -1]], self.ids)


class Certain(Disagreeing):
    """Proposes the likeliest token, as a source without a distribution."""

    def chains(self, last, lookahead, sampling):
        tokens, probabilities = zip(*super().chains(last, lookahead, Sampling(1e-6)), strict=True)
        assert all(rows.max() == 1 for rows in probabilities)
        return zip(tokens, [None] * len(tokens), strict=True)


@pytest.fixture(scope="module")
def real(llama: Callable[..., TargetModel]) -> TargetModel:
    """A quieter head than the others': many texts have their chance."""
    quiet = llama(21, VOCABULARY)
    with torch.no_grad():
        quiet.head_weight *= 0.25
    return quiet


@pytest.fixture(scope="module")
def target(real: TargetModel) -> Remembering:
    return Remembering(real)


CHAINS = (1, 2)
TREES = (DynamicTree(2, 3, 9), DynamicTree(2, 3, 5))


def draw(target: Remembering, source: ProposalSource, sampling: Sampling, draws: int, lookaheads=CHAINS) -> Tensor:
    """`[V, V, V]` how often every three tokens were written, with one lookahead and the other in turn.

    With lookahead 1 the third token can be a bonus token, with lookahead 2 a second proposal. Both are decoded
    together, so rows are ragged.
    """
    counts = torch.zeros(VOCABULARY**3)
    gc.disable()  # a third of the time would go into walking over the conversations, again and again
    for _ in range(draws // TOGETHER):
        texts = begin(target, source, TOGETHER, lookaheads, sampling)
        decode_together(texts)
        written = torch.tensor([text.tokens for text in texts]) @ torch.tensor([VOCABULARY**2, VOCABULARY, 1])
        counts += written.bincount(minlength=VOCABULARY**3)
    gc.enable()
    return counts.view(VOCABULARY, VOCABULARY, VOCABULARY)


def begin(
    target: Remembering, source: ProposalSource, count: int, lookaheads, sampling: Sampling
) -> list[Conversation]:
    firsts = sampling.choose(target.known[0, len(PROMPT) - 1].expand(count, -1)).tolist()
    read = torch.tensor(PROMPT).view(1, 1, -1, 1)
    places = torch.arange(len(PROMPT)).view(1, 1, -1, 1)
    seen = target.known[0, : len(PROMPT)]
    texts = []
    for turn, token in enumerate(firsts):
        cache = DynamicCache()
        cache.update(read, places, 0)
        start = Prefill(PROMPT, cache, seen, token, seen)
        texts.append(Conversation(target, source, start, lookaheads[turn % 2], 3, NEVER, sampling=sampling))
    return texts


def p_value(counts: Tensor, law: Tensor) -> float:
    """Pearson's chi-squared, cells pooled until 5 draws are expected in each; 0 if an impossible text was written."""
    if bool((counts[law == 0] > 0).any()):
        return 0.0
    pools = [[0.0, 0.0]]
    expected, order = (law[law > 0] * counts.sum()).sort()
    for hoped, seen in zip(expected.tolist(), counts[law > 0][order].tolist(), strict=True):
        if pools[-1][0] >= 5:
            pools.append([0.0, 0.0])
        pools[-1] = [pools[-1][0] + hoped, pools[-1][1] + seen]
    statistic = sum((seen - hoped) ** 2 / hoped for hoped, seen in pools)
    half = torch.tensor([(len(pools) - 1) / 2, statistic / 2], dtype=torch.double)
    return float(torch.special.gammaincc(half[0], half[1]))


@pytest.mark.parametrize(
    ("rule", "draws"),
    [(ALL, FEWER), *[pytest.param(rule, DRAWS, marks=pytest.mark.long) for rule in (ALL, NUCLEUS)]],
)
def test_three_tokens_follow_the_target(target, rule, draws):
    sampling = Sampling(*rule, torch.Generator().manual_seed(1))
    assert p_value(draw(target, Disagreeing(target), sampling, draws), target.law(*rule)) >= REJECTED


@pytest.mark.parametrize(
    ("rule", "draws"),
    [(ALL, FEWER), (NUCLEUS, FEWER), *[pytest.param(rule, DRAWS, marks=pytest.mark.long) for rule in (ALL, NUCLEUS)]],
)
def test_trees_follow_the_target(target, rule, draws):
    sampling = Sampling(*rule, torch.Generator().manual_seed(1))
    assert p_value(draw(target, Branching(target), sampling, draws, TREES), target.law(*rule)) >= REJECTED


def test_a_decoder_of_trees_without_the_residual_distribution_is_rejected(target, monkeypatch):
    monkeypatch.setattr(rejection, "residual", lambda p, q: p)
    sampling = Sampling(*ALL, torch.Generator().manual_seed(1))
    assert p_value(draw(target, Branching(target), sampling, FEWER, TREES), target.law(*ALL)) < REJECTED


def test_trees_that_are_said_to_be_draws_are_rejected(target):
    """Their tokens are the likeliest ones, proposed with certainty."""

    class Misstating(Branching):
        def tree(self, last, shape, sampling):
            tree = super().tree(last, shape, sampling)
            tokens, stated = tree.proposals.tokens, torch.zeros(len(tree.parents), VOCABULARY)
            texts = [[*last.tolist(), *([int(tokens[parent])] if parent >= 0 else [])] for parent in tree.parents]
            before, here = torch.tensor([text[-2:] for text in texts]).T  # trees have two levels
            stated[:, self.ids] = sampling.drafted(self.logits[before, here])
            return Tree(Proposals(tokens, stated), tree.parents)

    sampling = Sampling(*ALL, torch.Generator().manual_seed(1))
    assert p_value(draw(target, Misstating(target), sampling, FEWER, TREES), target.law(*ALL)) < REJECTED


@pytest.mark.parametrize("rule", [ALL, pytest.param(NUCLEUS, marks=pytest.mark.long)])
def test_a_decoder_without_the_residual_distribution_is_rejected(target, rule, monkeypatch):
    monkeypatch.setattr(rejection, "residual", lambda p, q: p)
    sampling = Sampling(*rule, torch.Generator().manual_seed(1))
    assert p_value(draw(target, Disagreeing(target), sampling, FEWER), target.law(*rule)) < REJECTED


@pytest.mark.parametrize("rule", [pytest.param(ALL, marks=pytest.mark.long), NUCLEUS])
def test_certain_proposals_follow_the_target_too(target, rule):
    sampling = Sampling(*rule, torch.Generator().manual_seed(1))
    assert p_value(draw(target, Certain(target), sampling, FEWER), target.law(*rule)) >= REJECTED


def test_a_draft_that_misstates_what_it_drew_from_is_rejected(target):
    class Misstating(Disagreeing):
        def sample(self, sequence, aux, lookahead, sampling):
            tokens = super().sample(sequence, aux, lookahead, sampling).tokens
            return Proposals(tokens, torch.full((lookahead, VOCABULARY), 1 / VOCABULARY))

    sampling = Sampling(*ALL, torch.Generator().manual_seed(1))
    assert p_value(draw(target, Misstating(target), sampling, FEWER), target.law(*ALL)) < REJECTED


@pytest.mark.parametrize("rule", [ALL, NUCLEUS])
def test_the_draft_disagrees(target, rule):
    """Or the tests above would prove little: some proposals are rejected, some accepted, and the text varies."""
    sampling = Sampling(*rule, torch.Generator().manual_seed(1))
    source = Disagreeing(target)
    texts = begin(target, source, 400, (1, 1), sampling)
    decode_together(texts)
    assert 0.2 < sum(text.accepted[0] for text in texts) / 400 < 0.8
    assert (target.law(*rule) * DRAWS >= 5).sum() > 100


@pytest.mark.parametrize("rule", [ALL, NUCLEUS])
def test_key_value_cache_and_memory_give_the_same_draws(real, target, rule):
    """`speculate` from the prompt on, with the real target, writes what the texts above are made of."""
    seen = set()
    for seed in range(60):
        both = [
            speculate(one, Disagreeing(target), PROMPT, 1 + seed % 2, 3, NEVER, sampling=Sampling(*rule, generator))
            for one in (real, target)
            for generator in [torch.Generator().manual_seed(seed)]
        ]
        assert both[0] == both[1]
        seen.add(both[0].tokens)
    assert len(seen) > 20


CONFIDENT = torch.linspace(-3, 3, VOCABULARY)[torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(2))]
"""By the token before: the logit of a made-up confidence."""
SECONDS = (0.0, 1.0, 1.5, 1.55)
"""Of a step by verified tokens: a second proposal costs next to nothing once there is a first."""


class ConfidentRows(Rows):
    confidences: Tensor | None = None

    def propose(self, turns):
        found = super().propose(turns)
        self.confidences = torch.zeros(len(self.proposers), 2)
        for row, tree in found.items():
            before = [turns[row].text[-1], int(tree.proposals.tokens[0])]
            self.confidences[row] = CONFIDENT[before]
        return found


class Confident(Disagreeing):
    def proposers(self, count):
        return ConfidentRows([self] * count)


def text_by_text(schedule: Schedule) -> Schedule:
    """Each text alone, by `SECONDS`: beside thousands of others none would matter."""
    return lambda survivals, _: [schedule(row[None], SECONDS.__getitem__)[0] for row in survivals]


def afterwards(survivals: Tensor, seconds: Callable[[int], float]) -> list[int]:
    """The size of the greatest speed, of all sizes: it knows what the proposals are when it decides on them."""
    (row,) = survivals
    speeds = [(1 + float(row[:count].sum())) / seconds(1 + count) for count in range(len(row) + 1)]
    return [max(range(len(speeds)), key=speeds.__getitem__)]


COSTS = FittedCosts(*[CostFit(**dict.fromkeys(TERMS, 0.01), knee=0)] * 2)


@pytest.mark.parametrize("draws", [FEWER, pytest.param(DRAWS, marks=pytest.mark.long)])
@pytest.mark.parametrize("schedule", [text_by_text(admitted), admitted], ids=["each alone", "together"])
def test_scheduled_verification_follows_the_target(target, schedule, draws):
    sampling = Sampling(*ALL, torch.Generator().manual_seed(1))
    source = Scheduled(Confident(target), COSTS, (0.8, 1.3), schedule)
    assert p_value(draw(target, source, sampling, draws, (2, 2)), target.law(*ALL)) >= REJECTED


def test_a_schedule_that_looks_at_what_it_verifies_is_rejected(target):
    sampling = Sampling(*ALL, torch.Generator().manual_seed(1))
    source = Scheduled(Confident(target), COSTS, (0.8, 1.3), text_by_text(afterwards))
    assert p_value(draw(target, source, sampling, FEWER, (2, 2)), target.law(*ALL)) < REJECTED


LAYERS = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "intermediate_size": 8, "layer_types": ["full_attention"]}
BLOCKS = {
    "dspark": {"block_size": 3, "markov_rank": 4},
    "domino": {"block_size": 4, "gru_hidden_dim": 5, "emb_dim": 4},
    "dflash2": {"block_size": 4, "conv_group_size": 4, "selector_rank": 4, "selector_top_k": 5},
}


def block_draft(method: str) -> Draft:
    """Untrained, but loud; its features are what the target has for them."""
    torch.manual_seed(3)
    config, every = parse_draft_config({"method": method} | LAYERS | BLOCKS[method]), torch.arange(VOCABULARY)
    draft = build_draft(config, torch.randn(VOCABULARY, VOCABULARY), DraftVocabulary(every, VOCABULARY), (0,))
    for name, parameter in draft.named_parameters():
        torch.nn.init.normal_(parameter, float("norm" in name), 0.6)
    draft.start_from(torch.randn(VOCABULARY, VOCABULARY) / 4)
    return draft


IN_SHORT = {("dspark", ALL), ("domino", NUCLEUS), ("dflash2", ALL)}


@pytest.mark.parametrize(
    ("method", "rule", "draws"),
    [
        pytest.param(
            method, rule, draws, marks=() if draws == FEWER and (method, rule) in IN_SHORT else pytest.mark.long
        )
        for method in BLOCKS
        for rule in (ALL, NUCLEUS)
        for draws in (FEWER, DRAWS)
    ],
)
def test_block_drafts_follow_the_target(target, method, rule, draws):
    sampling, draft = Sampling(*rule, torch.Generator().manual_seed(1)), block_draft(method)
    sources = [draft]
    if draft.config.confident:
        sources.append(Scheduled(draft, COSTS, (1.0, 1.0, 1.0), text_by_text(admitted)))
    for source in sources:
        assert p_value(draw(target, source, sampling, draws), target.law(*rule)) >= REJECTED
