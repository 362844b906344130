"""Which side of the data path is the slow one, and who is to blame when nothing moves, in words."""

import time

from sqlalchemy.exc import DBAPIError

from infra.ledger.ledger import Ledger
from infra.ledger.schema import LEASED, PENDING
from infra.records.data_path import CaptureRates, SideRates

WAITING = 0.05
"""Share of waiting from which the trainer counts as waiting for data."""
HINTS = {
    "inference": "more generators (generator.count, pools.inference_gpus) would help",
    "transport": "a faster transport or more generators writing at once would help",
    "training": "more ranks (training.ranks, pools.training_gpus) would help",
}


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
    side = slow_side(rates)
    generators = f"{rates.generators} generator{'s' if rates.generators != 1 else ''}"
    ranks = f"{rates.ranks} rank{'s' if rates.ranks != 1 else ''}"
    return (
        f"{side} is the slow side: training could take {_rate(rates.training)} ({ranks}), inference could give "
        f"{_rate(rates.inference)} ({generators}), transport {_rate(rates.transport)}; training waits for data "
        f"{rates.data_wait_share:.0%} of the time, so {HINTS[side]}"
    )


def _rate(tokens_per_s: float | None) -> str:
    return "an unknown number of tokens/s" if tokens_per_s is None else f"{tokens_per_s:,.0f} tokens/s"


def blame(ledger: Ledger) -> str:
    """Who is to blame for a run that does not move, in one sentence."""
    oldest, states = ledger.oldest(), ledger.progress()
    if oldest is None:
        return "training is to blame: every sample is captured and taken; see logs/trainer.log"
    place = f"epoch {oldest.epoch} ordinal {oldest.ordinal} ({oldest.tokens} tokens)"
    if oldest.state == LEASED:
        held = f" for {oldest.held_s:.0f} s" if oldest.held_s else ""
        return (
            f"inference is to blame: {oldest.owner} has held {place}{held} without publishing it; "
            f"see logs/{oldest.owner}.log"
        )
    if oldest.state == PENDING:
        return (
            f"inference is to blame: nobody captures {place}, {states.pending} samples are pending; "
            "see logs/generator-*.log"
        )
    return (
        f"training is to blame: {place} and {states.ready} samples in all are ready and not taken; see logs/trainer.log"
    )


class StallError(RuntimeError):
    """Nothing moved for too long; the message names the guilty side."""


class StallWatch:
    """Looks whether a run moves, once its first sample is captured (a large target loads for long)."""

    def __init__(self, ledger: Ledger, stall_s: float):
        self._ledger, self._stall_s = ledger, stall_s
        self._seen: object = None
        self._since = self._looked = time.monotonic()

    def check(self) -> None:
        """Raise StallError when neither a sample was captured nor one trained for `stall_s` seconds.

        A database that is away for less is none of this watch's business: the run's processes come back to it.
        """
        now = time.monotonic()
        if now - self._looked < min(5.0, self._stall_s / 4):
            return
        self._looked = now
        try:
            captured = self._ledger.capture_rates().tokens
            seen = (self._ledger.progress(), captured)
        except DBAPIError as error:
            if now - self._since > self._stall_s:
                raise StallError(f"the ledger has not answered for {now - self._since:.0f} s: {error.orig}") from error
            return
        if seen != self._seen or not captured:
            self._seen, self._since = seen, now
        elif now - self._since > self._stall_s:
            raise StallError(f"no progress for {now - self._since:.0f} s: {blame(self._ledger)}")
