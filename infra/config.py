"""Configuration of everything below the tensors: pools, ledger, transport, tracking."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from infra.redaction import NO_PASSWORD, PASSWORD
from infra.refusal import Refusal

LONGEST_TEXT = 4096
LONGEST_NAME = 255
"""Bytes of one file name."""
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")
MOST_SEED = 2**32 - 1


def _number_fields(schema: dict[str, Any]) -> None:
    """Prefect's form sorts fields by `position`; PostgreSQL, which keeps the schema, forgets the order of its keys."""
    for position, field in enumerate(schema.get("properties", {}).values()):
        field["position"] = position


class StrictConfig(BaseModel):
    """Base of every section: frozen, no unknown settings, no NaN or infinity, no text that no file could be named."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        str_max_length=LONGEST_TEXT,
        json_schema_extra=_number_fields,
    )

    @field_validator("*")
    @classmethod
    def _printable(cls, value: Any) -> Any:
        texts = value.items() if isinstance(value, dict) else value if isinstance(value, tuple) else (value,)
        for text in texts:
            for part in text if isinstance(text, tuple) else (text,):
                if isinstance(part, str) and UNPRINTABLE.search(part):
                    raise Refusal(f"{part!r:.80} holds a control character or half a surrogate pair: remove it")
        return value


def _checked_address(address: str) -> str:
    if PASSWORD.search(address):
        raise Refusal(
            f"{address} holds a password or token, and a recipe is kept with its runs and shown in pages: leave it out "
            "and give it by the environment (write an @ of a path as %40). PostgreSQL's clients read $PGPASSWORD or "
            "~/.pgpass, MLflow's $MLFLOW_TRACKING_USERNAME and $MLFLOW_TRACKING_PASSWORD, S3's $AWS_SECRET_ACCESS_KEY"
        )
    if not address.strip():
        raise Refusal("an empty address: name a file, folder or URL, or leave the setting out")
    if "://" not in address and any(len(part.encode()) > LONGEST_NAME for part in address.split("/")):
        raise Refusal(f"{address:.40}... holds a name of over {LONGEST_NAME} bytes, which no file can have: shorten it")
    return address


# Prefect's server checks forms by the pattern, before it keeps what was filled in.
Address = Annotated[str, AfterValidator(_checked_address), Field(json_schema_extra={"pattern": NO_PASSWORD})]
"""A URL or path, without a secret."""
Seed = Annotated[int, Field(ge=0, le=MOST_SEED)]


class RayConfig(StrictConfig):
    """Pools that a Ray cluster places."""

    address: str = Field(
        default="auto",
        description="HOST:PORT of the cluster's head; `auto`: $RAY_ADDRESS, or the cluster that runs here.",
    )
    autoscaling: bool = Field(
        default=False, description="The cluster grows on demand: what does not fit into its present machines waits."
    )


class SlurmConfig(StrictConfig):
    """Pools that are a Slurm job."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time_limit: str = Field(default="1-00:00:00", description="Of the job: days-hours:minutes:seconds.")
    memory_per_core: str | None = Field(default=None, description="Such as 8G. Default: the cluster's own.")
    options: tuple[str, ...] = Field(default=(), description="More options for sbatch, such as --constraint=h100.")


class PoolsConfig(StrictConfig):
    """Where generators and trainer ranks run."""

    kind: Literal["local", "ray", "slurm"] = Field(
        default="local", description="`local`: this machine. `ray`, `slurm`: where the cluster places them."
    )
    inference_gpus: int = Field(default=0, ge=0, le=100_000, description="GPUs for generators; 0 runs them on the CPU.")
    training_gpus: int = Field(
        default=0, ge=0, le=100_000, description="GPUs for trainer ranks; 0 runs them on the CPU."
    )
    wait_hours: float = Field(
        default=24.0, gt=0, le=100_000, description="A run for which no GPUs come free in time fails."
    )
    cores_per_gpu: int = Field(
        default=4, ge=1, le=4096, description="Cores asked for with every GPU; for `ray` and `slurm`."
    )
    cores: int = Field(
        default=4,
        ge=1,
        le=4096,
        description="Cores of a generator, or of the trainer, without GPUs; for `ray` and `slurm`.",
    )
    ray: RayConfig = RayConfig()
    slurm: SlurmConfig = SlurmConfig()


class LedgerConfig(StrictConfig):
    """The durable record of every sample."""

    url: Address | None = Field(
        default=None,
        description="SQLAlchemy URL, without a password ($PGPASSWORD); default: ledger.sqlite in the run folder.",
    )
    lease_seconds: float = Field(
        default=120.0, gt=0, le=1_000_000, description="A lease not published within this time is taken back."
    )
    max_attempts: int = Field(
        default=2,
        ge=1,
        le=1000,
        description="Failed captures before a sample is quarantined, in different generators where there are several. "
        "Only values that are not finite, refused prompts and missing rows count, and only where the engine's canary "
        "passes afterwards: faults of engines and machines are no sample's.",
    )
    max_quarantined: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="Stop the run when more than this share of its samples is quarantined. A single sample never stops "
        "it, however small the run, unless this is 0.",
    )


class TransportConfig(StrictConfig):
    """What carries hidden states, and how many bytes may be on their way."""

    kind: Literal["auto", "arena", "files", "mooncake", "stored"] = Field(
        default="auto",
        description="`arena`: one reused piece of shared memory, the fast one of one machine. `files`: a file per "
        "sample. `auto`: the arena where enough shared memory is free. `mooncake`: between machines, by RDMA or TCP. "
        "`stored`: hidden states are kept in `folder` and captured once.",
    )
    budget_mib: int = Field(
        default=512, ge=1, le=2**26, description="Bound on the bytes held between capture and training."
    )
    folder: Address | None = Field(
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
    receive: Literal["auto", "host", "device"] = Field(
        default="auto",
        description="Where samples arrive at the trainer. `host`: in pinned memory, every checksum verified. `device`: "
        "by RDMA in the GPU's own (GPUDirect), one sample in 16 verified. `auto`: the GPU's where that works.",
    )

    @model_validator(mode="after")
    def _stored_needs_a_folder(self) -> Self:
        if self.kind == "stored" and self.folder is None:
            raise Refusal("kind=stored keeps hidden states: say where by transport.folder (a folder or an s3:// URL)")
        return self


class TrackingConfig(StrictConfig):
    """MLflow."""

    uri: Address | None = Field(
        default=None, description="Tracking server; default: $MLFLOW_TRACKING_URI, then runs/mlflow.db."
    )
    experiment: str = Field(default="draftsmith", min_length=1, max_length=250)
    registered_model: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_. -]*$",
        max_length=200,
        description="Registry name; default: draft-<recipe name>.",
    )
