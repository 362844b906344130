"""How a run learns from servers that have users."""

from pathlib import Path

from pydantic import Field

from infra.config import Address, Share, StrictConfig


class LiveServerConfig(StrictConfig):
    """An SGLang server that was started with $DRAFTSMITH_LIVE."""

    address: Address = Field(description="Its HTTP address, like http://127.0.0.1:30000.")
    socket: Path = Field(description="Its $DRAFTSMITH_LIVE: the socket at which it listens for generators.")


class LiveConfig(StrictConfig):
    """Learning from users' requests (`generator.engine=serving`)."""

    servers: tuple[LiveServerConfig, ...] = Field(
        min_length=1,
        description="Servers of the target on this machine; each has a generator of its own (generator.count).",
    )
    consent: str = Field(
        min_length=10,
        max_length=1000,
        description="On what ground users' requests may be learned from, and who decided it: a sentence for whoever "
        "asks later. It is kept with the run.",
    )
    retention_days: float = Field(
        gt=0,
        le=3650,
        description="The run's folder and its rows in a shared ledger hold users' text. `clean-up` removes them this "
        "number of days after the first requests were collected, or later, when the run has ended. Its daily schedule "
        "has to be switched on.",
    )
    share: Share = Field(default=0.05, description="Share of the finished requests that is learned from.")
    patience_s: float = Field(
        default=1.0,
        ge=0,
        le=3600,
        description="Seconds that a request waits, once it is over, for its server to be idle. A server that is never "
        "idle hands over one request each time they have passed.",
    )
    tenants: tuple[str, ...] = Field(
        default=(),
        description="Only requests with one of these values of the header X-SMG-Routing-Key; default: of everybody.",
    )
    acceptance_at_most: float | None = Field(
        default=None,
        ge=1,
        le=1000,
        description="Only requests with at most this number of tokens per verification step, where the served draft "
        "does badly. Default: all.",
    )
