"""How traffic is watched: the watch flow's parameter. Imported by flows and tasks; reaches pydantic only."""

from typing import Literal

from pydantic import ConfigDict, Field

from infra.config import Address, Seed, StrictConfig


class RequestLogConfig(StrictConfig):
    """Where served requests are logged, and how many of them become prompts."""

    model_config = ConfigDict(title="Request logs")

    folder: Address = Field(
        description="A folder or an s3:// URL; its .jsonl and .jsonl.gz files hold one request per line, with "
        "`messages` or `prompt` as in OpenAI's API."
    )
    hours: float = Field(
        default=168.0, gt=0, le=100_000, description="Only files that changed within this many hours are read."
    )
    prompts: int = Field(
        default=2000,
        ge=1,
        le=10_000_000,
        description="At most this many are kept; logs are read from the newest file on until there are so many.",
    )
    longest_characters: int = Field(
        default=20_000, ge=1, le=100_000_000, description="Longer requests are left out and counted."
    )
    seed: Seed = Field(default=0, description="Of the random sample.")


class WatchConfig(StrictConfig):
    """The servers of one draft, and the drift test."""

    model_config = ConfigDict(title="Watch")

    draft: str = Field(description="Registered model whose versions the servers run.")
    servers: tuple[Address, ...] = Field(
        min_length=1,
        description="Addresses of the SGLang servers (started with --enable-metrics), for instance http://host:30000.",
    )
    traffic: Literal["greedy", "sampled"] = Field(
        default="greedy",
        description="What most requests ask for; the benchmark's figure of that kind is the reference.",
    )
    fall: float = Field(
        default=0.10, gt=0, lt=0.5, description="Relative fall of the acceptance length that the test is made for."
    )
    average_run_length: float = Field(
        default=5000.0, ge=100, le=1_000_000_000, description="Windows to a false alarm, on average and at least."
    )
    window_steps: int = Field(
        default=2000,
        ge=50,
        le=1_000_000_000,
        description="Least verification steps of a window; with less traffic it goes on.",
    )
    keep_windows: int = Field(
        default=5000, ge=100, le=1_000_000, description="Newest windows that are kept of a version that serves."
    )
    quiet_hours: float = Field(
        default=168.0,
        ge=0,
        le=100_000,
        description="After an alarm of a version, none is raised for so long: retraining takes time.",
    )
    probation_windows: int = Field(
        default=50,
        ge=0,
        le=1_000_000,
        description="An alarm so soon after a version began to serve, while it accepts less than the one before did "
        "(by half of `fall`), is the version's fault: the event asks for its rollback, not for retraining. 0: never.",
    )
    timeout_s: float = Field(default=10.0, gt=0, le=3600, description="Of one question to a server.")
    requests: RequestLogConfig | None = Field(
        default=None, description="Without it an alarm carries no fresh prompts, and retraining uses the recipe's own."
    )
    folder: Address | None = Field(
        default=None, description="Where windows are kept: a folder or an s3:// URL; default: drift/ among the runs."
    )
    tracking_uri: Address | None = Field(
        default=None, description="Tracking server; default: $MLFLOW_TRACKING_URI, then runs/mlflow.db."
    )
