"""Configuration of everything below the tensors: pools, ledger, transport, tracking."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class PoolsConfig(BaseModel):
    """Where generators and trainer ranks run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["local"] = Field(default="local", description="`local`: this machine.")
    inference_gpus: int = Field(default=0, ge=0, description="GPUs for generators; 0 runs them on the CPU.")
    training_gpus: int = Field(default=0, ge=0, description="GPUs for trainer ranks; 0 runs them on the CPU.")
    wait_hours: float = Field(default=24.0, gt=0, description="A run for which no GPUs come free in time fails.")


class LedgerConfig(BaseModel):
    """The durable record of every sample."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    url: str | None = Field(default=None, description="SQLAlchemy URL; default: ledger.sqlite in the run folder.")
    lease_seconds: float = Field(
        default=120.0, gt=0, description="A lease not published within this time is taken back."
    )
    max_attempts: int = Field(default=3, ge=1, description="Capture failures before a sample is quarantined.")


class TransportConfig(BaseModel):
    """What carries hidden states, and how many bytes may be on their way."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["auto", "arena", "files", "mooncake", "stored"] = Field(
        default="auto",
        description="`arena`: one reused piece of shared memory, the fast one of one machine. `files`: a file per "
        "sample. `auto`: the arena where shared memory is large enough. `mooncake`: between machines, by RDMA or TCP. "
        "`stored`: hidden states are kept in `folder` and captured once.",
    )
    budget_mib: int = Field(default=512, ge=1, description="Bound on the bytes held between capture and training.")
    folder: str | None = Field(
        default=None,
        description="Default: shared memory, or the run folder where that is too small. For `stored`: a folder or an "
        "s3:// URL.",
    )
    address: str = Field(
        default="127.0.0.1",
        description="Mooncake's: address of the machine that holds the store, in a private network of all machines.",
    )
    protocol: Literal["auto", "rdma", "tcp"] = Field(
        default="auto", description="Mooncake's; `auto`: RDMA where this machine has a device with an active port."
    )

    @model_validator(mode="after")
    def _stored_needs_a_folder(self) -> Self:
        if self.kind == "stored" and self.folder is None:
            raise ValueError(
                "kind=stored keeps hidden states: say where by transport.folder (a folder or an s3:// URL)"
            )
        return self


class TrackingConfig(BaseModel):
    """MLflow."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    uri: str | None = Field(
        default=None, description="Tracking server; default: $MLFLOW_TRACKING_URI, then runs/mlflow.db."
    )
    experiment: str = "draftsmith"
    registered_model: str | None = Field(default=None, description="Registry name; default: draft-<recipe name>.")
