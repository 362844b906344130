"""All measurements of a benchmark, in one process with the target loaded once.

Greedy and sampled continuations of the target, simulated walks of every source over them, real decoding of a part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from models.benchmark.contestants import Contestants, draft_of
from models.benchmark.reference import ReferenceRun, decode_reference, decode_sampled
from models.config.benchmark import BenchmarkConfig
from models.decoding.acceptance import AcceptedCounts, acceptance_length
from models.decoding.plain import continue_batch
from models.decoding.prompt_lookup import PromptLookup
from models.decoding.simulated import features, features_and_likeliest, simulate
from models.decoding.speculative import Decoded
from models.decoding.token_recycling import TokenRecycling
from models.drafts.batched_proposer import ProposalSource
from models.drafts.vocabulary import DraftVocabulary
from models.progress_bars import bars
from models.targets.model import TargetModel

POSITIONS = 256
"""Looked at for the vocabulary's mass: each takes the target's whole head, which in small targets outweighs their
layers."""
CHUNK = 64
DRAFT, CHAMPION, PROMPT_LOOKUP, TOKEN_RECYCLING = "draft", "champion", "prompt_lookup", "token_recycling"

Walk = list[tuple[AcceptedCounts, ...]]
"""Per conversation, counts at lookahead 1..max_lookahead."""


def at(walk: Walk, lookahead: int) -> list[AcceptedCounts]:
    """One lookahead's counts of every conversation."""
    return [counts[lookahead - 1] for counts in walk]


@dataclass(frozen=True)
class WalkedTexts:
    """The target's own continuations of some prompts, and the walk of every source over them, by name."""

    texts: list[list[int]]
    walks: Mapping[str, Walk]


@dataclass(frozen=True)
class Measurements:
    """What was seen, before any figure is made of it."""

    greedy: WalkedTexts
    sampled: WalkedTexts
    reference: ReferenceRun
    sampled_reference: tuple[Decoded, ...]
    vocabulary_mass: float
    """See `vocabulary_mass`."""

    def gap(self, lookahead: int) -> float:
        """Simulated / reference acceptance length - 1 over the conversations decoded for real."""
        real = [result.counts for result in self.reference.decoded]
        simulated = at(self.greedy.walks[DRAFT], lookahead)[: len(real)]
        return acceptance_length(simulated) / acceptance_length(real) - 1

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
    contestants: Contestants, config: BenchmarkConfig, prompts: Sequence[Sequence[int]], seed: int
) -> Measurements:
    """Measure everything; real decoding at `config.lookahead`."""
    sources = {DRAFT: contestants.draft, PROMPT_LOOKUP: PromptLookup(), TOKEN_RECYCLING: TokenRecycling()}
    champion = {CHAMPION: contestants.champion} if contestants.champion else {}
    greedy = walk_texts(contestants, config, "greedy", prompts, sources | champion)
    sampled = walk_texts(
        contestants, config, "sampled", prompts, sources, temperature=config.sampled_temperature, seed=seed
    )
    with bars() as bar:
        decoded = bar("decoding", config.reference_tokens)
        reference = decode_reference(contestants, config, prompts, greedy.texts, decoded)
        decoded = bar("decoding, sampled", config.sampled_reference_tokens)
        sampled_reference = decode_sampled(contestants, config, prompts, seed, decoded)
    vocabulary = draft_of(contestants.draft).vocabulary
    mass = vocabulary_mass(contestants.target, vocabulary, prompts, sampled.texts, config.sampled_temperature)
    return Measurements(greedy, sampled, reference, sampled_reference, mass)


def measure_suite(
    contestants: Contestants, config: BenchmarkConfig, name: str, prompts: Sequence[Sequence[int]]
) -> WalkedTexts:
    """Draft and champion, if there is one, over the target's greedy texts of further prompts."""
    champion = {CHAMPION: contestants.champion} if contestants.champion else {}
    return walk_texts(contestants, config, name, prompts, {DRAFT: contestants.draft} | champion)


def walk_texts(
    contestants: Contestants,
    config: BenchmarkConfig,
    name: str,
    prompts: Sequence[Sequence[int]],
    sources: Mapping[str, ProposalSource],
    *,
    temperature: float = 0.0,
    seed: int = 0,
) -> WalkedTexts:
    """Let the target continue all prompts, and walk over them; a conversation takes one forward for all sources."""
    target, walks = contestants.target, {source: Walk() for source in sources}
    candidates = max(source.proposers(1).candidates for source in sources.values())
    with bars() as bar:
        texts = continue_batch(
            target, prompts, config.max_new_tokens, temperature, contestants.eos_ids,
            torch.Generator(target.device).manual_seed(seed), top_p=config.sampled_top_p,
            batch_size=config.batch_size, advance=bar(f"{name}, continuations", len(prompts)),
        )  # fmt: skip
        walked = bar(f"{name}, walks", len(prompts))
        for prompt, text in zip(prompts, texts, strict=True):
            whole, likeliest = [*prompt, *text], None
            if candidates:
                aux, likeliest = features_and_likeliest(target, whole, candidates)
            else:
                aux = features(target, whole)
            for source, proposing in sources.items():
                walks[source].append(simulate(proposing, prompt, text, aux, config.max_lookahead, likeliest))
            walked(1)
    return WalkedTexts(texts, walks)


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
