"""All measurements of a benchmark, in one process with the target loaded once.

Greedy and sampled continuations of the target, walks of every source over them, real decoding of a part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from models.benchmark.conditions import sampled_law
from models.benchmark.contestants import Contestants, SelectedLayers, draft_of
from models.benchmark.reference import ReferenceRun, decode_reference, decode_sampled
from models.config.benchmark import BenchmarkConfig, Proposals
from models.decoding.acceptance import AcceptedCounts, AnyCounts, ExpectedCounts, acceptance_length
from models.decoding.continuations import continue_batch
from models.decoding.prompt_lookup import PromptLookup
from models.decoding.sampled_walk import walk_sampled
from models.decoding.simulated import read_texts, simulate
from models.decoding.speculative import Decoded
from models.decoding.suffix_decoding import SuffixDecoding
from models.decoding.token_recycling import TokenRecycling
from models.drafts.base import Draft
from models.drafts.batched_proposer import DrawingSource, ProposalSource
from models.drafts.sampling import GREEDY, Sampling
from models.drafts.vocabulary import DraftVocabulary
from models.progress_bars import bars
from models.targets.model import TargetModel

POSITIONS = 256
"""Looked at for the vocabulary's mass: each takes the target's whole head, which in small targets outweighs their
layers."""
CHUNK = 64
LEAST_CONVERSATIONS = 8
"""Fewer have no standard error worth the name: two that happen to agree would make any difference a huge one."""
WALKED_ROWS = 2048
"""Sampled tokens that drafts walk over at once, which bounds their logits: 2 GiB for 262,144 tokens."""
DRAFT, CHAMPION, PROMPT_LOOKUP = "draft", "champion", "prompt_lookup"
TOKEN_RECYCLING, SUFFIX, SUFFIX_WARM = "Token Recycling", "suffix decoding", "suffix decoding, warm"
"""Baselines that no engine of ours serves, by the names that people see."""

Walk = list[tuple[AcceptedCounts, ...]]
"""Per conversation, counts at lookahead 1 to that of `walked_to`."""
DrawnWalk = list[tuple[ExpectedCounts, ...]]
"""The same where the draft draws its proposals."""


def at(walk: Sequence[Sequence[AnyCounts]], lookahead: int) -> list[AnyCounts]:
    """One lookahead's counts of every conversation."""
    return [counts[lookahead - 1] for counts in walk]


@dataclass(frozen=True)
class WalkedTexts:
    """The target's own continuations of some prompts, and the walk of every source over them, by name."""

    texts: list[list[int]]
    walks: Mapping[str, Walk]
    """Greedy proposals."""
    drawn: Mapping[str, DrawnWalk]
    """Of drafts over sampled text, proposals drawn from their distributions."""

    def by_rule(self, proposals: Proposals) -> Mapping[str, Walk | DrawnWalk]:
        """Every source as an engine serves it that proposes like this; baselines propose with certainty."""
        return {**self.walks, **(self.drawn if proposals == "drawn" else {})}


@dataclass(frozen=True)
class Measurements:
    """What was seen, before any figure is made of it."""

    greedy: WalkedTexts
    sampled: WalkedTexts
    reference: ReferenceRun
    reference_walk: Walk
    """The draft's walk over the texts of `reference`, which may differ from `greedy` where logits tie."""
    sampled_reference: tuple[Decoded, ...]
    proposals: Proposals
    """How the draft proposed in `sampled_reference`."""
    vocabulary_mass: float
    """See `vocabulary_mass`."""

    def traffic(self, sampling: Literal["sampled", "greedy"]) -> WalkedTexts:
        """The texts that are like the traffic."""
        return self.sampled if sampling == "sampled" else self.greedy

    def gap(self, lookahead: int) -> float:
        """Simulated / reference acceptance length - 1 over the conversations decoded for real."""
        real = [result.counts for result in self.reference.decoded]
        return acceptance_length(at(self.reference_walk, lookahead)) / acceptance_length(real) - 1

    def sampled_deviation(self, lookahead: int) -> float | None:
        """How many standard errors real sampled decoding lies above the walk over other texts of the same prompts.

        The error is linearised over conversations. None with fewer than `LEAST_CONVERSATIONS`, or without any spread.
        """
        walks = self.sampled.drawn if self.proposals == "drawn" else self.sampled.walks
        real = [decoded.counts for decoded in self.sampled_reference]
        walked = at(walks[DRAFT], lookahead)[: len(real)]
        if len(real) < LEAST_CONVERSATIONS or not sum(counts.steps for counts in real):
            return None
        sides = [np.array([(counts.tokens, counts.steps) for counts in side], dtype=float) for side in (real, walked)]
        lengths = [float(rows[:, 0].sum() / rows[:, 1].sum()) for rows in sides]
        first, second = (
            (rows[:, 0] - length * rows[:, 1]) / rows[:, 1].sum() for rows, length in zip(sides, lengths, strict=True)
        )
        error = float(((first - second) ** 2).sum() * len(real) / (len(real) - 1)) ** 0.5
        return (lengths[0] - lengths[1]) / error if error else None

    def identical(self, lookahead: int) -> tuple[bool, int]:
        """Whether simulated and reference counts agree in every step, and in how many conversations that was asked.

        A conversation with a tie or a mismatch holds two different texts, so its counts may differ.
        """
        real, simulated = self.reference, at(self.greedy.walks[DRAFT], lookahead)
        pairs = [
            (walked, result.counts)
            for walked, result, comparison in zip(simulated, real.decoded, real.comparisons, strict=False)
            if not comparison.divergences
        ]
        return all(walked == counts for walked, counts in pairs), len(pairs)


def measure(
    contestants: Contestants,
    config: BenchmarkConfig,
    prompts: Sequence[Sequence[int]],
    seed: int,
    logged: Sequence[Sequence[int]] = (),
) -> Measurements:
    """Measure everything; real decoding at `config.lookahead`. `logged`: tokens of earlier requests."""
    sources: dict[str, ProposalSource] = {DRAFT: contestants.draft, PROMPT_LOOKUP: PromptLookup()}
    sources |= {TOKEN_RECYCLING: TokenRecycling(), SUFFIX: SuffixDecoding()}
    if logged:
        sources[SUFFIX_WARM] = SuffixDecoding(logged)
    champion = {CHAMPION: contestants.champion} if contestants.champion else {}
    greedy = walk_texts(contestants, config, "greedy", prompts, sources | champion)
    law = sampled_law(config, contestants.recommended)
    sampled = walk_texts(contestants, config, "sampled", prompts, sources | champion, sampling=law, seed=seed)
    with bars() as bar:
        decoded = bar("decoding", config.reference_tokens)
        reference = decode_reference(contestants, config, prompts, greedy.texts, decoded)
        written = [each.tokens for each in reference.decoded]
        walked = walk_decoded(contestants, contestants.draft, prompts, written, config.max_lookahead)
        decoded = bar("decoding, sampled", config.sampled_reference_tokens)
        sampled_reference = decode_sampled(contestants, config, prompts, seed, decoded)
    vocabulary = draft_of(contestants.draft).vocabulary
    mass = vocabulary_mass(contestants.target, vocabulary, prompts, sampled.texts, law.temperature)
    return Measurements(greedy, sampled, reference, walked, sampled_reference, config.sampled_proposals, mass)


def walked_to(source: ProposalSource, config: BenchmarkConfig) -> int:
    """The largest lookahead of a source's walk. A block draft is served in whole blocks, which may be longer than the
    recipe's `max_lookahead`: that of a champion before the method was changed."""
    if not isinstance(source, Draft | SelectedLayers):
        return config.max_lookahead
    return max(config.max_lookahead, *draft_of(source).config.lookaheads(config.max_lookahead))


def walk_decoded(
    contestants: Contestants,
    source: ProposalSource,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    max_lookahead: int,
) -> Walk:
    """A source's walk over greedy texts that something else than this process's plain decoding gave, one by one.

    In bfloat16 logits often tie, and another engine, or a batch of another size, decides otherwise. The lengths of two
    texts differ by chance; those of one text by a defect.
    """
    candidates, walk = source.proposers(1).candidates, Walk()
    for prompt, text in zip(prompts, texts, strict=False):
        (reading,) = read_texts(contestants.target, [[*prompt, *text]], candidates=candidates)
        aux, known = reading.aux, reading.likeliest
        walk.append(simulate(source, prompt, text, aux, max_lookahead, known, eos_ids=contestants.eos_ids))
    return walk


def measure_suite(
    contestants: Contestants,
    config: BenchmarkConfig,
    name: str,
    prompts: Sequence[Sequence[int]],
    *,
    sampled: bool,
    seed: int,
) -> WalkedTexts:
    """What the gate compares, over the target's texts of further prompts, sampled or greedy."""
    sources = {DRAFT: contestants.draft, PROMPT_LOOKUP: PromptLookup()}
    champion = {CHAMPION: contestants.champion} if contestants.champion else {}
    law = sampled_law(config, contestants.recommended) if sampled else GREEDY
    return walk_texts(contestants, config, name, prompts, sources | champion, sampling=law, seed=seed)


def walk_texts(
    contestants: Contestants,
    config: BenchmarkConfig,
    name: str,
    prompts: Sequence[Sequence[int]],
    sources: Mapping[str, ProposalSource],
    *,
    sampling: Sampling = GREEDY,
    seed: int = 0,
) -> WalkedTexts:
    """Let the target continue all prompts, and walk over them; a conversation takes one forward for all sources."""
    target, eos_ids, walks = contestants.target, contestants.eos_ids, {source: Walk() for source in sources}
    drawing = {} if sampling.greedy else {name: of for name, of in sources.items() if isinstance(of, DrawingSource)}
    drawn = {source: DrawnWalk() for source in drawing}
    candidates = max(source.proposers(1).candidates for source in sources.values())
    with bars() as bar:
        texts = continue_batch(
            target, prompts, config.max_new_tokens, eos_ids,
            sampling.seeded(seed, target.device),
            batch_size=config.batch_size, advance=bar(f"{name}, continuations", len(prompts)),
        )  # fmt: skip
        walked = bar(f"{name}, walks", len(prompts))
        # Greedy text is read one by one: its counts must be those of decoding, where rounding decides between equals.
        fitting = max(1, min(config.batch_size, WALKED_ROWS // config.max_new_tokens))
        together = 1 if sampling.greedy else fitting
        for first in range(0, len(prompts), together):
            pairs = list(zip(prompts, texts, strict=True))[first : first + together]
            readings = read_texts(
                target, [[*prompt, *text] for prompt, text in pairs], candidates=candidates,
                sampled=[len(text) - 1 for _, text in pairs] if drawing else (), sampling=sampling,
            )  # fmt: skip
            for source, proposing in sources.items():
                most = walked_to(proposing, config)
                if source in drawing:
                    found = walk_sampled(drawing[source], readings, most, sampling, eos_ids=eos_ids)
                    walks[source] += [each.greedy for each in found]
                    drawn[source] += [each.drawn for each in found]
                    continue
                for (prompt, text), reading in zip(pairs, readings, strict=True):
                    counts = simulate(
                        proposing, prompt, text, reading.aux, most, reading.likeliest, eos_ids=eos_ids
                    )  # fmt: skip
                    walks[source].append(counts)
            walked(len(pairs))
    return WalkedTexts(texts, walks, drawn)


@torch.no_grad()
def vocabulary_mass(
    target: TargetModel,
    vocabulary: DraftVocabulary,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    temperature: float,
) -> float:
    """Share of the target's probability, at `temperature`, on the draft vocabulary.

    Mean over the first `POSITIONS` positions of `texts`, the target's own continuations of `prompts`: what lies outside
    is rejected whatever the draft learns.
    """
    if len(vocabulary) == vocabulary.target_size:
        return 1.0
    ids, found = vocabulary.target_ids.to(target.device), list[float]()
    for prompt, text in zip(prompts, texts, strict=True):
        if len(found) >= POSITIONS:
            break
        states = target.forward(torch.tensor([[*prompt, *text[:-1]]], device=target.device)).last[0, len(prompt) - 1 :]
        for chunk in states.split(CHUNK):
            found += (target.logits(chunk) / temperature).softmax(-1)[:, ids].sum(-1).tolist()
    return sum(found) / len(found)
