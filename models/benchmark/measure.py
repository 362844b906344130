"""All measurements of a benchmark, in one process with the target loaded once.

Greedy and sampled continuations of the target, simulated walks of every source over them, real decoding of a part.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from models.benchmark.contestants import Contestants
from models.benchmark.coverage import vocabulary_mass
from models.benchmark.reference import ReferenceRun, decode_reference, decode_sampled
from models.config.benchmark import BenchmarkConfig
from models.decoding.acceptance import acceptance_length
from models.decoding.counts import AcceptedCounts
from models.decoding.plain import continue_batch
from models.decoding.prompt_lookup import PromptLookup
from models.decoding.simulated import features, features_and_likeliest, simulate
from models.decoding.speculative import Decoded
from models.decoding.token_recycling import TokenRecycling
from models.drafts.batched_proposer import ProposalSource
from models.progress_bars import bars

Texts = list[list[int]]
Walk = list[tuple[AcceptedCounts, ...]]
"""Per conversation, counts at lookahead 1..max_lookahead."""


def at(walk: Walk, lookahead: int) -> list[AcceptedCounts]:
    """One lookahead's counts of every conversation."""
    return [counts[lookahead - 1] for counts in walk]


@dataclass(frozen=True)
class Measurements:
    """What was seen, before any figure is made of it."""

    greedy: Texts
    sampled: Texts
    draft: Walk
    prompt_lookup: Walk
    token_recycling: Walk
    champion: Walk | None
    draft_sampled: Walk
    prompt_lookup_sampled: Walk
    token_recycling_sampled: Walk
    reference: dict[int, ReferenceRun]
    """Reference decoding by lookahead."""
    sampled_reference: tuple[Decoded, ...]
    vocabulary_mass: float
    """See `models.benchmark.coverage`."""

    def gap(self, lookahead: int) -> float:
        """Simulated / reference acceptance length - 1 over the conversations decoded for real."""
        real = [result.counts for result in self.reference[lookahead].decoded]
        return acceptance_length(at(self.draft, lookahead)[: len(real)]) / acceptance_length(real) - 1

    def identical(self, lookahead: int) -> tuple[bool, int]:
        """Whether simulated and reference counts agree in every step, and in how many conversations that was asked.

        A conversation with a tie or a mismatch holds two different texts, so its counts may differ.
        """
        run = self.reference[lookahead]
        pairs = [
            (simulated, result.counts)
            for simulated, result, comparison in zip(
                at(self.draft, lookahead), run.decoded, run.comparisons, strict=False
            )
            if not comparison.divergences
        ]
        return all(simulated == real for simulated, real in pairs), len(pairs)


def measure(
    contestants: Contestants,
    config: BenchmarkConfig,
    lookaheads: Sequence[int],
    prompts: Sequence[Sequence[int]],
    seed: int,
) -> Measurements:
    """Measure everything; real decoding at each of `lookaheads`."""
    assert max(lookaheads) <= config.max_lookahead
    sources: list[ProposalSource] = [contestants.draft, PromptLookup(), TokenRecycling()]
    with bars() as bar:
        greedy = _continue(contestants, config, prompts, 0.0, seed, bar("greedy continuations", len(prompts)))
        sampled = _continue(
            contestants, config, prompts, config.sampled_temperature, seed,
            bar("sampled continuations", len(prompts)),
        )  # fmt: skip
        champions = [contestants.champion] if contestants.champion else []
        walks = _walk(contestants, config, [*sources, *champions], prompts, greedy, bar("walks", len(prompts)))
        sampled_walks = _walk(contestants, config, sources, prompts, sampled, bar("walks, sampled", len(prompts)))
        reference = {}
        for lookahead in lookaheads:
            decoded = bar(f"decoding at lookahead {lookahead}", config.reference_tokens)
            reference[lookahead] = decode_reference(contestants, config, lookahead, prompts, greedy, decoded)
        sampled_decoded = bar("decoding, sampled", config.sampled_reference_tokens)
        sampled_reference = decode_sampled(contestants, config, prompts, seed, sampled_decoded)
    return Measurements(
        greedy=greedy,
        sampled=sampled,
        draft=walks[0],
        prompt_lookup=walks[1],
        token_recycling=walks[2],
        champion=walks[3] if champions else None,
        draft_sampled=sampled_walks[0],
        prompt_lookup_sampled=sampled_walks[1],
        token_recycling_sampled=sampled_walks[2],
        reference=reference,
        sampled_reference=sampled_reference,
        vocabulary_mass=vocabulary_mass(
            contestants.target, contestants.vocabulary, prompts, sampled, config.sampled_temperature
        ),
    )


@dataclass(frozen=True)
class SuiteWalks:
    """The target's greedy texts of some prompts, and the walks over them."""

    texts: Texts
    draft: Walk
    champion: Walk | None


def measure_suite(
    contestants: Contestants, config: BenchmarkConfig, name: str, prompts: Sequence[Sequence[int]]
) -> SuiteWalks:
    """Draft and champion, if there is one, over further prompts."""
    champions = [contestants.champion] if contestants.champion else []
    with bars() as bar:
        texts = _continue(contestants, config, prompts, 0.0, 0, bar(f"{name}, continuations", len(prompts)))
        sources = [contestants.draft, *champions]
        walks = _walk(contestants, config, sources, prompts, texts, bar(f"{name}, walks", len(prompts)))
    return SuiteWalks(texts, walks[0], walks[1] if champions else None)


def _continue(
    contestants: Contestants,
    config: BenchmarkConfig,
    prompts: Sequence[Sequence[int]],
    temperature: float,
    seed: int,
    advance: Callable[[int], None],
) -> Texts:
    target = contestants.target
    return continue_batch(
        target,
        prompts,
        config.max_new_tokens,
        temperature,
        contestants.eos_ids,
        torch.Generator(target.device).manual_seed(seed),
        top_p=config.sampled_top_p,
        batch_size=config.batch_size,
        advance=advance,
    )


def _walk(
    contestants: Contestants,
    config: BenchmarkConfig,
    sources: Sequence[ProposalSource],
    prompts: Sequence[Sequence[int]],
    texts: Texts,
    advance: Callable[[int], None],
) -> list[Walk]:
    """One walk per source; each conversation takes one target forward for all of them."""
    walks: list[Walk] = [[] for _ in sources]
    candidates = max(source.proposers(1).candidates for source in sources)
    for prompt, text in zip(prompts, texts, strict=True):
        whole, likeliest = [*prompt, *text], None
        if candidates:
            aux, likeliest = features_and_likeliest(contestants.target, whole, candidates)
        else:
            aux = features(contestants.target, whole)
        for walk, source in zip(walks, sources, strict=True):
            walk.append(simulate(source, prompt, text, aux, config.max_lookahead, likeliest))
        advance(1)
    return walks
