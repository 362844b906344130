"""All measurements of a benchmark, in one process with the target loaded once.

Greedy and sampled continuations of the target, walks of every source over them, real decoding of a part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from infra.records.data_path import TargetRecord
from models.benchmark.conditions import sampled_law
from models.benchmark.contestants import Contestants, SelectedLayers, draft_of
from models.benchmark.reference import ReferenceRun, decode_reference
from models.config.benchmark import BenchmarkConfig, Proposals
from models.data.request_log import logged_texts
from models.data.tokenizer import read_tokenizer
from models.decoding.acceptance import AcceptedCounts, AnyCounts, ExpectedCounts, acceptance_length
from models.decoding.continuations import continue_batch
from models.decoding.prompt_lookup import PromptLookup
from models.decoding.sampled_walk import walk_sampled
from models.decoding.simulated import TextReading, read_texts, simulate
from models.decoding.suffix_decoding import SuffixDecoding
from models.decoding.token_recycling import TokenRecycling
from models.drafts.base import Draft
from models.drafts.batched_proposer import DrawingSource, ProposalSource
from models.drafts.sampling import GREEDY, Sampling
from models.progress_bars import bars

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

    @classmethod
    def of(cls, sources: Mapping[str, ProposalSource], sampling: Sampling) -> "WalkedTexts":
        """No text yet, of those that the target draws with `sampling`."""
        drafts = [name for name, each in sources.items() if isinstance(each, DrawingSource) and not sampling.greedy]
        return cls([], {name: Walk() for name in sources}, {name: DrawnWalk() for name in drafts})

    def add_walks(
        self,
        sources: Mapping[str, ProposalSource],
        pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
        readings: Sequence[TextReading],
        most: Mapping[str, int],
        *,
        sampling: Sampling,
        eos_ids: frozenset[int],
    ) -> None:
        """Let every source walk over some texts; `pairs`: prompt and text; `most`: largest lookahead of each source."""
        for name, source in sources.items():
            if name in self.drawn:
                assert isinstance(source, DrawingSource)
                found = walk_sampled(source, readings, most[name], sampling, eos_ids=eos_ids)
                self.walks[name].extend(each.greedy for each in found)
                self.drawn[name].extend(each.drawn for each in found)
                continue
            for (prompt, text), reading in zip(pairs, readings, strict=True):
                known = reading.likeliest
                counts = simulate(source, prompt, text, reading.aux, most[name], known, eos_ids=eos_ids)
                self.walks[name].append(counts)

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

    def traffic(self, sampling: Literal["sampled", "greedy"]) -> WalkedTexts:
        """The texts that are like the traffic."""
        return self.sampled if sampling == "sampled" else self.greedy

    def gap(self, lookahead: int) -> float:
        """Simulated / reference acceptance length - 1 over the conversations decoded for real."""
        real = [result.counts for result in self.reference.decoded]
        return acceptance_length(at(self.reference_walk, lookahead)) / acceptance_length(real) - 1

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
    sources = judged_sources(contestants) | {TOKEN_RECYCLING: TokenRecycling(), SUFFIX: SuffixDecoding()}
    if logged:
        sources[SUFFIX_WARM] = SuffixDecoding(logged)
    greedy = walk_texts(contestants, config, "greedy", prompts, sources)
    law = sampled_law(config, contestants.recommended)
    sampled = walk_texts(contestants, config, "sampled", prompts, sources, sampling=law, seed=seed)
    with bars() as bar:
        decoded = bar("decoding", config.reference_tokens)
        reference = decode_reference(contestants, config, prompts, greedy.texts, decoded)
        written = [each.tokens for each in reference.decoded]
        walked = walk_decoded(contestants, contestants.draft, prompts, written, config.max_lookahead)
    return Measurements(greedy, sampled, reference, walked)


def logged_tokens(target: TargetRecord, log: Path | str) -> list[list[int]]:
    """Tokens of the requests in a log. Raises Refusal if it cannot be read or has no text."""
    tokenizer = read_tokenizer(target.path)
    return [tokenizer.encode(text, add_special_tokens=False) for text in logged_texts(log)]


def judged_sources(contestants: Contestants) -> dict[str, ProposalSource]:
    """What the gate compares, by name."""
    champion = {CHAMPION: contestants.champion} if contestants.champion else {}
    return {DRAFT: contestants.draft, PROMPT_LOOKUP: PromptLookup(), **champion}


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
    law = sampled_law(config, contestants.recommended) if sampled else GREEDY
    return walk_texts(contestants, config, name, prompts, judged_sources(contestants), sampling=law, seed=seed)


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
    target, eos_ids, found = contestants.target, contestants.eos_ids, WalkedTexts.of(sources, sampling)
    most = {source: walked_to(proposing, config) for source, proposing in sources.items()}
    candidates = max(source.proposers(1).candidates for source in sources.values())
    with bars() as bar:
        found.texts.extend(continue_batch(
            target, prompts, config.max_new_tokens, eos_ids,
            sampling.seeded(seed, target.device),
            batch_size=config.batch_size, advance=bar(f"{name}, continuations", len(prompts)),
        ))  # fmt: skip
        walked = bar(f"{name}, walks", len(prompts))
        # Greedy text is read one by one: its counts must be those of decoding, where rounding decides between equals.
        fitting = max(1, min(config.batch_size, WALKED_ROWS // config.max_new_tokens))
        together = 1 if sampling.greedy else fitting
        for first in range(0, len(prompts), together):
            pairs = list(zip(prompts, found.texts, strict=True))[first : first + together]
            readings = read_texts(
                target, [[*prompt, *text] for prompt, text in pairs], candidates=candidates,
                sampled=[len(text) - 1 for _, text in pairs] if found.drawn else (), sampling=sampling,
            )  # fmt: skip
            found.add_walks(sources, pairs, readings, most, sampling=sampling, eos_ids=eos_ids)
            walked(len(pairs))
    return found
