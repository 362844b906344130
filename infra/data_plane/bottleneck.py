"""Which side of the data path is the slow one, and when a run therefore wants more or fewer generators."""

from dataclasses import dataclass, replace
from typing import Literal, Self

from infra.quantities import plural
from infra.records.data_path import CaptureRates, SideRates

WAITING = 0.05
"""Share of waiting from which the trainer counts as waiting for data."""
HINTS = {
    "inference": "more generators (generator.count, pools.inference_gpus) would help",
    "transport": "a faster transport or more generators writing at once would help",
    "training": "more ranks (training.ranks, pools.training_gpus) would help",
}
EARLY = " although enough could be captured, as at the start of a run or while users of a live server send little"

LOOKS = 3
"""Consecutive measurements that must agree, however far apart they are."""
ENOUGH = 1.2
"""One generator fewer must still give this multiple of what training takes, or it would soon be wanted again."""


def side_rates(
    captured: CaptureRates, *, trained_tokens: int, trained_s: float, waited_s: float, fetch_s: float, ranks: int
) -> SideRates:
    """What each side could do by itself.

    `trained_tokens` were trained in `trained_s` seconds, `waited_s` of them waiting for samples, `fetch_s` copying them
    out of the transport (in the background, on every one of `ranks`).
    """
    working_s = trained_s - waited_s
    transfer_s = captured.put_s / max(1, captured.generators) + fetch_s
    return SideRates(
        inference=captured.tokens * captured.generators / captured.prefill_s if captured.prefill_s else None,
        transport=captured.tokens / transfer_s if captured.tokens and transfer_s else None,
        training=trained_tokens / working_s if trained_tokens and working_s > 0 else None,
        data_wait_share=waited_s / trained_s if trained_s else 0.0,
        generators=captured.generators,
        ranks=ranks,
    )


def slow_side(rates: SideRates) -> str:
    """`inference`, `transport` or `training`."""
    if rates.data_wait_share < WAITING:
        return "training"
    if rates.inference is None or rates.transport is None:
        return "inference"
    return "inference" if rates.inference <= rates.transport else "transport"


def in_words(rates: SideRates) -> str:
    """One sentence: the slow side, with the rates behind the verdict."""
    if rates.training is None:
        return "nothing has been trained yet"
    side, supply = slow_side(rates), _supply(rates)
    verdict, hint = f"{side} is the slow side", f", so {HINTS[side]}"
    if side != "training" and supply is not None and supply >= rates.training:
        verdict, hint = "no side is the slow one", EARLY
    ranks, generators = plural(rates.ranks, "rank"), plural(rates.generators, "generator")
    return (
        f"{verdict}: training could take {_rate(rates.training)} ({ranks}), inference could give "
        f"{_rate(rates.inference)} ({generators}), transport {_rate(rates.transport)}; training waits for data "
        f"{rates.data_wait_share:.0%} of the time{hint}"
    )


def _supply(rates: SideRates) -> float | None:
    """Tokens per second that all generators could hand over: in each, prefills and transfers take turns."""
    if not rates.inference or not rates.transport:
        return None
    return 1 / (1 / rates.inference + 1 / rates.transport)


def _rate(tokens_per_s: float | None) -> str:
    return "an unknown number of tokens/s" if tokens_per_s is None else f"{tokens_per_s:,.0f} tokens/s"


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
        supply = _supply(rates)
        if supply is None or rates.training is None:
            return 0
        side = slow_side(rates)
        # While one that was added still loads its target, inference is slow whatever it will come to.
        if side == "inference" and generators < self.max_count and rates.generators >= generators:
            return 1
        with_one_fewer = supply * (generators - 1) / max(1, rates.generators)
        if side == "training" and generators > self.count and with_one_fewer >= ENOUGH * rates.training:
            return -1
        return 0
