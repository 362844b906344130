"""Decides when a run wants one generator more or less, from repeated measurements of the bottleneck. Pure functions."""

from dataclasses import dataclass, replace
from typing import Literal, Self

from infra.data_plane.bottleneck import slow_side
from infra.records.data_path import SideRates

LOOKS = 3
"""Consecutive measurements that must agree, however far apart they are."""
ENOUGH = 1.2
"""One generator fewer must still give this multiple of what training takes, or it would soon be wanted again."""


@dataclass(frozen=True)
class Elasticity:
    """What the looks so far speak for."""

    count: int
    max_count: int
    patience_s: float
    """How long a side must have been the slow one, in seconds."""
    leaning: Literal[-1, 0, 1] = 0
    since: float = 0.0
    """Time of the first of the looks in a row that lean so."""
    until: float = 0.0
    """Time of the last one."""
    looks: int = 0

    @property
    def change(self) -> Literal[-1, 0, 1]:
        """1: one generator more is wanted; -1: the last one that was added may go."""
        patient = self.looks >= LOOKS and self.until - self.since >= self.patience_s
        return self.leaning if patient else 0

    def after(self, at: float, rates: SideRates, generators: int) -> Self:
        """Add a measurement: the trainer's latest `rates`, with this number of generators."""
        leaning = self._lean(rates, generators)
        if leaning != self.leaning:
            return replace(self, leaning=leaning, since=at, until=at, looks=1)
        return replace(self, until=at, looks=self.looks + 1)

    def afresh(self) -> Self:
        """Forget all measurements, because the number of generators has changed or cannot change now."""
        return replace(self, leaning=0, looks=0)

    def without_one(self) -> Self:
        """Lower the upper bound: a generator that cannot be kept running is not tried forever."""
        return replace(self.afresh(), max_count=max(self.count, self.max_count - 1))

    def _lean(self, rates: SideRates, generators: int) -> Literal[-1, 0, 1]:
        if rates.inference is None or rates.transport is None or rates.training is None:
            return 0
        side = slow_side(rates)
        # While one that was added still loads its target, inference is slow whatever it will come to.
        if side == "inference" and generators < self.max_count and rates.generators >= generators:
            return 1
        if side == "training" and generators > self.count:
            # Prefills and transfers take turns in the slowest generator; that is how all are reckoned here.
            supply = 1 / (1 / rates.inference + 1 / rates.transport)
            if supply * (generators - 1) / rates.generators >= ENOUGH * rates.training:
                return -1
        return 0
