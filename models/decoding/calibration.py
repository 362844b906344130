"""Calibration of a draft's confidences by a temperature for each position (DSpark, arXiv 2607.05147, section on STS).

Position by position, from the first, the temperature is chosen that brings the chance of reaching and accepting a
proposal nearest to how often that happens, given the positions before.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from infra.records.goodput import ConfidenceFit
from models.decoding.plain import Prefill
from models.decoding.speculative import Conversation, decode_together
from models.drafts.batched_proposer import ChangedTurns, ProposalSource, Proposer, Turn
from models.drafts.sampling import Sampling
from models.drafts.trees import Tree
from models.targets.model import TargetModel

GRID = torch.logspace(-1, 1, 41, dtype=torch.double)
"""Temperatures that are tried, as SGLang's own fitter does (0.5.23)."""
BINS, DRAWS = 10, 50


def expected_error(chances: Tensor, happened: Tensor) -> float:
    """Expected calibration error of `[n]` chances: |mean chance - share| in bins of equal width, weighted by size."""
    place = (chances * BINS).long().clamp(0, BINS - 1)
    differences = torch.zeros(BINS, dtype=torch.double).index_add_(0, place, chances.double() - happened.double())
    return float(differences.abs().sum() / len(chances))


def fit_temperatures(logits: Tensor, accepted: Tensor) -> list[float]:
    """S temperatures from n steps: logits `[n, S]` of confidences, and how many proposals were accepted `[n]`."""
    found, before = [], torch.ones(len(logits), dtype=torch.double)
    for position, own in enumerate(logits.double().unbind(1)):
        happened = accepted > position
        errors = [expected_error(before * (own / temperature).sigmoid(), happened) for temperature in GRID]
        found.append(float(GRID[min(range(len(GRID)), key=errors.__getitem__)]))
        before = before * (own / found[-1]).sigmoid()
    return found


def errors_by_position(logits: Tensor, accepted: Tensor, temperatures: Sequence[float]) -> list[float]:
    """`expected_error` of reaching and accepting each position."""
    chances = _chances(logits, temperatures)
    return [expected_error(own, accepted > position) for position, own in enumerate(chances.unbind(1))]


def _chances(logits: Tensor, temperatures: Sequence[float]) -> Tensor:
    """`[n, S]` float64, of reaching and accepting each position."""
    return (logits.double() / torch.tensor(temperatures, dtype=torch.double)).sigmoid().cumprod(-1)


def errors_by_chance(logits: Tensor, temperatures: Sequence[float], seed: int = 0) -> list[float]:
    """Mean `errors_by_position` if every chance were exact, by drawing what happens: above 0, the more the fewer steps.

    `[n, S]` logits.
    """
    generator = torch.Generator().manual_seed(seed)
    chances = _chances(logits, temperatures)
    drawn = (torch.rand(DRAWS, *chances.shape, generator=generator, dtype=torch.double) < chances).unbind(0)
    columns = [[expected_error(*pair) for pair in zip(chances.T, happened.T, strict=True)] for happened in drawn]
    return [sum(errors) / DRAWS for errors in zip(*columns, strict=True)]


def calibrate(logits: Tensor, accepted: Tensor) -> ConfidenceFit:
    """Temperatures of all steps, and errors that each half has by the temperatures of the other."""
    halves = [(logits[first::2], accepted[first::2]) for first in (0, 1)]
    after, chance = [], []
    for (own, happened), other in zip(halves, reversed(halves), strict=True):
        temperatures = fit_temperatures(*other)
        after.append(errors_by_position(own, happened, temperatures))
        chance.append(errors_by_chance(own, temperatures))
    ones = [1.0] * logits.shape[1]
    return ConfidenceFit(
        temperatures=tuple(fit_temperatures(logits, accepted)),
        steps=len(logits),
        errors_before=tuple(errors_by_position(logits, accepted, ones)),
        errors_after=tuple(sum(errors) / 2 for errors in zip(*after, strict=True)),
        errors_by_chance=tuple(sum(errors) / 2 for errors in zip(*chance, strict=True)),
    )


def decoded_confidences(
    source: ProposalSource,
    texts: Sequence[tuple[Prefill, Sampling]],
    lookahead: int,
    new_tokens: int,
    target: TargetModel,
    eos_ids: frozenset[int],
) -> tuple[Tensor, Tensor]:
    """Decode for real; logits `[n, S]` and accepted `[n]` of all steps but each text's last, which its end may cut.

    The prefills of `texts` are used up; all samplings have the same rule.
    """
    watched = _Watched(source)
    begin = partial(Conversation, target, watched, shape=lookahead, max_new_tokens=new_tokens, eos_ids=eos_ids)
    begun = [begin(start=start, sampling=own) for start, own in texts]
    # Decoding leaves out texts that their first token ends.
    going = [text for text in begun if not text.over]
    decode_together(going)
    logits = [torch.empty(0, lookahead, dtype=torch.double)]
    logits += [own[None] for seen in watched.seen for own in seen[:-1]]
    counts = [count for seen, text in zip(watched.seen, going, strict=True) for count in text.accepted[: len(seen) - 1]]
    return torch.cat(logits), torch.tensor(counts, dtype=torch.long)


class _Watched:
    """A source whose proposers' confidences are written down, text by text."""

    def __init__(self, source: ProposalSource):
        self.source = source
        self.seen: list[list[Tensor]] = []

    def proposers(self, count: int) -> "_WatchedProposer":
        self.seen = [[] for _ in range(count)]
        return _WatchedProposer(self.seen, self.source.proposers(count))


class _WatchedProposer(ChangedTurns):
    def __init__(self, seen: Sequence[list[Tensor]], batch: Proposer):
        super().__init__(batch, lambda turn: turn)
        self.seen = list(seen)

    def propose(self, turns: Mapping[int, Turn]) -> dict[int, Tree]:
        found, confidences = super().propose(turns), self.confidences
        assert confidences is not None
        for row in found:
            self.seen[row].append(confidences[row].cpu().double())
        return found

    def only(self, rows: Sequence[int]) -> None:
        self.seen = [self.seen[row] for row in rows]
        super().only(rows)
