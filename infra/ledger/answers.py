"""The ledger's answers, and the errors it raises."""

from typing import NamedTuple

from infra.records.data_path import CheckpointRecord, Record
from infra.refusal import Refusal


class StaleIncarnation(Refusal):
    """A newer trainer has resumed this run. The caller must stop and write nothing more."""


class RepeatedCrash(Refusal):
    """The trainer crashed again and again at the same step; the message names that step's samples."""


class Wait(Record):
    """The next step cannot be planned yet."""

    step: int
    needed: int
    """Samples of that step."""
    ready: int
    """Those of them that are ready."""
    first_missing: int | None
    """Strict order: lowest ordinal of the step that is not ready."""


class EndOfEpoch(Record):
    """Every sample of the epoch is taken, consumed or quarantined."""

    epoch: int


class Resume(Record):
    """Where a trainer resumes."""

    incarnation: int
    """Named by every write of this trainer."""
    checkpoint: CheckpointRecord | None
    """None to start from the beginning."""
    epoch: int
    """The epoch to open (idempotent) and to resume in."""
    dropped: tuple[CheckpointRecord, ...]
    """Newer checkpoints whose files do not verify; their rows are gone."""
    evicted: int
    """Captured or leased samples given up because the samples before them need their bytes first."""


class Quarantined(NamedTuple):
    """A sample that could not be captured."""

    epoch: int
    ordinal: int
    sample: int
    error: str


class Oldest(NamedTuple):
    """The first sample that is still to be trained."""

    epoch: int
    ordinal: int
    state: str
    owner: str | None
    tokens: int
    held_s: float | None
    """Seconds since its lease was last renewed."""
