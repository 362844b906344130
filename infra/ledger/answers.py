"""What a ledger answers to whoever looks at a run."""

from typing import NamedTuple


class Quarantined(NamedTuple):
    """A sample that could not be captured."""

    epoch: int
    ordinal: int
    sample: int
    error: str


class LastCapture(NamedTuple):
    """When a sample was published."""

    at: float
    """By the database's clock."""
    ago_s: float


class Oldest(NamedTuple):
    """The first sample that is still to be trained."""

    epoch: int
    ordinal: int
    state: str
    owner: str | None
    tokens: int
    held_s: float | None
    """Seconds since its lease was last renewed."""
