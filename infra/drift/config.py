"""Settings of the watch flow."""

from typing import Literal

from pydantic import ConfigDict, Field, field_validator

from infra.config import Address, Seed, StrictConfig
from infra.refusal import Refusal


class RequestLogConfig(StrictConfig):
    """Logs of served requests, and how many requests become prompts."""

    model_config = ConfigDict(title="Request logs")

    folder: Address = Field(
        description="A folder or an s3:// URL; its .jsonl files, rotated and compressed ones too (.jsonl.1, "
        ".jsonl.2.gz), hold one request per line, with `messages` or `prompt` as in OpenAI's API. Of SGLang's own "
        "files (--export-metrics-to-file) requests to /generate are read; of chats they hold token ids alone, so log "
        "these at your gateway."
    )
    hours: float = Field(default=168.0, gt=0, le=100_000, description="Maximum age of the files, in hours.")
    prompts: int = Field(
        default=2000,
        ge=1,
        le=10_000_000,
        description="Most requests that are kept; logs are read hour by hour, from those written last, until there are "
        "enough.",
    )
    longest_characters: int = Field(
        default=20_000,
        ge=1,
        le=100_000_000,
        description="Longest request with its tools, in characters; others are left out.",
    )
    low_acceptance: float = Field(
        default=1.0,
        ge=0,
        le=10,
        description="How much requests are preferred that accepted little: a request's chance is proportional to its "
        "verification steps per token to this power; 0: all alike. Read from SGLang's `completion_tokens` and "
        "`spec_verify_ct`, in the line or in its `meta_info`; without them two tokens a step are assumed.",
    )
    seed: Seed = Field(default=0, description="Seed of the random sample.")


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
        description="How most requests are decoded; chooses the benchmark's figure that is the reference.",
    )
    fall: float = Field(
        default=0.10, gt=0, lt=0.5, description="Relative fall of acceptance that the test must detect."
    )
    average_run_length: float = Field(
        default=5000.0, ge=100, le=1_000_000_000, description="Mean number of windows between false alarms, at least."
    )
    window_steps: int = Field(
        default=2000,
        ge=50,
        le=1_000_000_000,
        description="Verification steps of a window, at least; with little traffic it lasts longer.",
    )
    keep_windows: int = Field(default=5000, ge=100, le=1_000_000, description="Windows kept per serving version.")
    quiet_hours: float = Field(
        default=168.0,
        ge=0,
        le=100_000,
        description="Hours without another alarm for the same version, because retraining takes time.",
    )
    probation_windows: int = Field(
        default=50,
        ge=0,
        le=1_000_000,
        description="An alarm within the first windows of a version that accepts less than its predecessor (by half of "
        "`fall`) asks for a rollback, not for retraining. 0: never.",
    )
    timeout_s: float = Field(default=10.0, gt=0, le=3600, description="Timeout of one request to a server, in seconds.")
    requests: RequestLogConfig | None = Field(
        default=None, description="Request logs for fresh prompts; default: retraining uses the recipe's own data."
    )
    prompt_days: float = Field(
        default=60.0, gt=0, le=100_000, description="Fresh prompts in `folder` are removed after this many days."
    )
    folder: Address | None = Field(
        default=None,
        description="Folder or s3:// URL of windows and fresh prompts; default: drift/ in the runs folder.",
    )
    tracking_uri: Address | None = Field(
        default=None, description="Tracking server; default: $MLFLOW_TRACKING_URI, then runs/mlflow.db."
    )

    @field_validator("servers")
    @classmethod
    def _each_once(cls, servers: tuple[str, ...]) -> tuple[str, ...]:
        addresses = tuple(server.rstrip("/") for server in servers)
        twice = [server for index, server in enumerate(addresses) if server in addresses[:index]]
        if twice:
            raise Refusal(f"{twice[0]} is named more than once, and would be counted as often: name it once")
        return addresses
