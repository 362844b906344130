"""Stops a run that loses too many of its samples."""

import time

from sqlalchemy.exc import DBAPIError

from infra.ledger.ledger import Ledger
from infra.refusal import Refusal

LOOK_S = 5.0
SHOWN_ERRORS = 3


class QuarantineLimit:
    """The share of a run's samples that may be quarantined (`ledger.max_quarantined`)."""

    def __init__(self, ledger: Ledger, max_share: float):
        self._ledger, self._max_share = ledger, max_share
        self._looked = 0.0

    def look(self) -> None:
        """Check every few seconds. A database that does not answer is the stall watch's business."""
        if time.monotonic() - self._looked < LOOK_S:
            return
        self._looked = time.monotonic()
        try:
            self.check()
        except DBAPIError:
            return

    def check(self) -> None:
        """Raise Refusal when more samples are quarantined than the limit allows.

        One sample is always allowed, or a run of fewer than 100 samples could lose none at the default of 1 %. A limit
        of 0 allows none.
        """
        count, total = self._ledger.quarantined_samples()
        allowed = max(1, int(self._max_share * total)) if self._max_share else 0
        if count <= allowed:
            return
        listed = self._ledger.quarantined()
        errors = list(dict.fromkeys(f"sample {bad.sample}: {bad.error}" for bad in listed))[:SHOWN_ERRORS]
        raise Refusal(
            f"{count} of {total} samples ({count / total:.1%}) are quarantined, and ledger.max_quarantined="
            f"{self._max_share:g} allows {allowed}. The first errors are: {'; '.join(errors)}. Change what they name "
            "and start a new run, or resume with a higher ledger.max_quarantined to train without these samples"
        )
