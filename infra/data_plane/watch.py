"""Watches whether a run moves and keeps its samples, and names the guilty side when it does not."""

import time

from sqlalchemy.exc import DBAPIError

from infra.ledger.ledger import Ledger
from infra.ledger.pulse import Pulse, pulse
from infra.ledger.schema import LEASED, PENDING, QUARANTINED
from infra.refusal import Refusal

LOOK_S = 5.0
AWAY_S = 60.0
"""Where nobody looked for so long, the flow itself stood still: a suspended job, a paused machine, a slow MLflow. No
more than this is counted of such a time, and not nothing: a run that hangs while MLflow is slow is found, later."""
SHOWN_ERRORS = 3


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


def check_quarantined(ledger: Ledger, max_share: float) -> None:
    """Raise Refusal when more of the run's samples are quarantined than `max_share` (`ledger.max_quarantined`) allows.

    One sample is always allowed, or a run of fewer than 100 samples could lose none at the default of 1 %. A limit
    of 0 allows none.
    """
    count = ledger.count(QUARANTINED)
    if count <= (1 if max_share else 0):
        return
    total = ledger.count()
    allowed = max(1, int(max_share * total)) if max_share else 0
    if count <= allowed:
        return
    errors = list(dict.fromkeys(f"sample {bad.sample}: {bad.error}" for bad in ledger.quarantined()))[:SHOWN_ERRORS]
    raise Refusal(
        f"{count} of {total} samples ({count / total:.1%}) are quarantined, and ledger.max_quarantined={max_share:g} "
        f"allows {allowed}. The first errors are: {'; '.join(errors)}. Change what they name and start a new run, or "
        "resume with a higher ledger.max_quarantined to train without these samples"
    )


class StallError(RuntimeError):
    """Nothing moved for too long; the message names the guilty side."""


class RunWatch:
    """Looks every few seconds whether a run moves, and whether it loses too many samples.

    It may stand still before its first sample is captured: a large target loads for long.
    """

    def __init__(self, ledger: Ledger, stall_s: float, max_quarantined: float):
        self._ledger, self._stall_s, self._max_quarantined = ledger, stall_s, max_quarantined
        self._seen: Pulse | None = None
        self._since = self._looked = time.monotonic()

    def check(self) -> None:
        """Raise StallError when neither a sample was captured nor one trained for `stall_s` seconds.

        Raises Refusal as `check_quarantined` does. A database that is away for less is waited for: the run's
        processes come back to it.
        """
        now = time.monotonic()
        away = now - self._looked
        if away < min(LOOK_S, self._stall_s / 4):
            return
        if away > AWAY_S:
            self._since += away - min(AWAY_S, self._stall_s / 4)
        try:
            check_quarantined(self._ledger, self._max_quarantined)
            seen = pulse(self._ledger)
        except DBAPIError as error:
            if now - self._since > self._stall_s:
                raise StallError(f"the ledger has not answered for {now - self._since:.0f} s: {error.orig}") from error
            return
        finally:
            self._looked = time.monotonic()
        if seen != self._seen or seen.captured_at is None:
            self._seen, self._since = seen, now
        elif now - self._since > self._stall_s:
            raise StallError(f"no progress for {now - self._since:.0f} s: {blame(self._ledger)}")
