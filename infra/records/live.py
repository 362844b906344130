"""What a generator and the plugin of a serving engine say to each other, a line of JSON each."""

from pathlib import Path

from infra.records.data_path import CaptureSpec, Record


def rank_socket(path: Path, rank: int) -> Path:
    """Socket of a server's rank, of which rank 0 listens at `path`. Only ranks with requests of their own have one."""
    return path.with_name(f"{path.name}.{rank}") if rank else path


class LiveRule(Record):
    """Which finished requests a run wants."""

    share: float
    tenants: tuple[str, ...] = ()
    """Empty: of everybody."""
    acceptance_at_most: float | None = None
    """Tokens per verification step."""
    patience_s: float = 1.0
    """A text waits so long for a moment in which nobody is served, whose answer its prefill would delay."""
    longest: int
    """Tokens that are kept of a text; a prompt must leave room for two of its answer."""


class Attach(Record):
    """The first line: a run begins to learn from a server."""

    spec: CaptureSpec
    rule: LiveRule
    password: str = ""
    """What the server's first rank has answered; empty: this is that one."""


class Attached(Record):
    """The reply: the password of the run's own requests, or why there is none."""

    password: str = ""
    ranks: int = 1
    """Of the server, with requests of their own: its copies, or the groups of data-parallel attention."""
    refused: str = ""


class LiveText(Record):
    """One finished request, cut to the rule's longest."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


class Taken(Record):
    """The reply to each further line, `{}`: the next text; None when none came in a while."""

    text: LiveText | None = None
    finished: int = 0
    """Requests that have finished since the run was attached to this rank."""
    passed_over: int = 0
    """Texts that the rule wanted and nobody fetched in time, and requests of a burst that nobody looked at."""
