"""Settings of pools, ledger, transport and tracking, and the base class of all settings."""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from infra.redaction import NO_PASSWORD, PASSWORD
from infra.refusal import Refusal

LONGEST_TEXT = 4096
LONGEST_NAME_BYTES = 255
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")


def _number_fields(schema: dict[str, Any]) -> None:
    """Prefect's form sorts fields by `position`, because PostgreSQL does not keep the order of a schema's keys."""
    for position, field in enumerate(schema.get("properties", {}).values()):
        field["position"] = position


def left_out(*names: str) -> Any:
    """A validator that drops fields which earlier versions wrote, into records that are kept, and this one has not."""

    def known(data: Any) -> Any:
        return {name: value for name, value in data.items() if name not in names} if isinstance(data, dict) else data

    return model_validator(mode="before")(known)


class StrictConfig(BaseModel):
    """Base of every section: frozen, no unknown settings, no NaN or infinity, no control characters."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, str_max_length=LONGEST_TEXT, json_schema_extra=_number_fields
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
    if "://" not in address and any(len(part.encode()) > LONGEST_NAME_BYTES for part in address.split("/")):
        raise Refusal(
            f"{address:.40}... holds a name of over {LONGEST_NAME_BYTES} bytes, too long for a file: shorten it"
        )
    return address


# Prefect's server checks the pattern before it stores a form.
Address = Annotated[str, AfterValidator(_checked_address), Field(json_schema_extra={"pattern": NO_PASSWORD})]
"""A URL or path, without a secret."""
Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
Count = Annotated[int, Field(ge=1, le=4096)]
Tokens = Annotated[int, Field(ge=1, le=2**24)]
AtLeastOne = Annotated[int, Field(ge=1, le=1_000_000_000)]
Share = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]


class RayConfig(StrictConfig):
    """Pools on a Ray cluster."""

    address: str = Field(default="auto", description="HOST:PORT; `auto`: $RAY_ADDRESS, or the local cluster.")
    autoscaling: bool = Field(
        default=False, description="Whether the cluster adds machines on demand: a pool that does not fit yet waits."
    )


class SlurmConfig(StrictConfig):
    """Pools as Slurm jobs."""

    partition: str | None = Field(default=None, description="Partition of the job; default: the cluster's.")
    account: str | None = Field(default=None, description="Account that the job is charged to; default: the user's.")
    qos: str | None = Field(default=None, description="Quality of service of the job; default: the cluster's.")
    time_limit: str = Field(default="1-00:00:00", description="Time limit as days-hours:minutes:seconds.")
    memory_per_core: str | None = Field(default=None, description="Memory per core, like 8G; default: the cluster's.")
    options: tuple[str, ...] = Field(default=(), description="More options for sbatch, such as --constraint=h100.")


class PoolsConfig(StrictConfig):
    """Where generators and trainer ranks run."""

    kind: Literal["local", "ray", "slurm"] = Field(
        default="local", description="`local`: this machine. `ray`, `slurm`: wherever the cluster places them."
    )
    inference_gpus: int = Field(default=0, ge=0, le=100_000, description="GPUs for generators; 0: on the CPU.")
    training_gpus: int = Field(default=0, ge=0, le=100_000, description="GPUs for trainer ranks; 0: on the CPU.")
    training_machines: Count = Field(
        default=1,
        description="Parts of the training pool, each on one machine, that share training.ranks evenly; with `ray` and "
        "`slurm`. The ranks meet in the private network of transport.address.",
    )
    machines_per_generator: Count = Field(
        default=1,
        description="Machines that hold a generator's copy of the target together, with equal numbers of GPUs; with "
        "`ray`, `slurm` and generator.engine=sglang. They meet in the private network of transport.address.",
    )
    sharing: Literal["auto", "apart", "alternate", "share"] = Field(
        default="auto",
        description="`apart`: generators and trainer have GPUs of their own. `alternate`: they take turns on the same "
        "ones: a round of hidden states is captured into files, the engine stops, the round is trained. `share`: they "
        "use the same ones at the same time. `auto`: `apart` if this machine has GPUs for both, else `share` if the "
        "planner says that both fit, else `alternate`. Only with kind=local.",
    )
    wait_hours: float = Field(default=24.0, gt=0, le=100_000, description="Longest wait for free GPUs, in hours.")
    cores_per_gpu: Count = Field(default=4, description="Cores requested per GPU, with `ray` and `slurm`.")
    cores: Count = Field(default=4, description="Cores of a process without GPUs, with `ray` and `slurm`.")
    ray: RayConfig = Field(default=RayConfig(), description="Settings of kind=ray.")
    slurm: SlurmConfig = Field(default=SlurmConfig(), description="Settings of kind=slurm.")


class LedgerConfig(StrictConfig):
    """The durable record of every sample."""

    url: Address | None = Field(
        default=None,
        description="SQLAlchemy URL without a password ($PGPASSWORD); default: ledger.sqlite in the run folder.",
    )
    lease_seconds: float = Field(
        default=120.0, gt=0, le=1_000_000, description="Seconds after which an unpublished lease is taken back."
    )
    max_attempts: int = Field(
        default=2,
        ge=1,
        le=1000,
        description="Failed captures before a sample is quarantined, in different generators where there are several. "
        "Only values that are not finite, refused prompts and missing rows count, and only if the engine's canary "
        "passes afterwards: a sample is never blamed for faults of engines and machines.",
    )
    max_quarantined: Share = Field(
        default=0.01,
        description="The run stops when more than this share of its samples is quarantined. A single sample never "
        "stops it unless this is 0.",
    )


class TransportConfig(StrictConfig):
    """What carries hidden states, and how many bytes may be in flight."""

    kind: Literal["auto", "arena", "files", "mooncake", "stored"] = Field(
        default="auto",
        description="`arena`: a reused region of shared memory, the fastest on one machine. `files`: one file per "
        "sample. `auto`: the arena if enough shared memory is free. `mooncake`: between machines, by RDMA or TCP. "
        "`stored`: hidden states are captured once and kept in `folder`.",
    )
    budget_mib: int | None = Field(
        default=None,
        ge=1,
        le=2**26,
        description="Most MiB held between capture and training. Mooncake divides them among the trainer's machines. "
        "Default: what the samples in flight may need, at least 512.",
    )
    round_mib: int | None = Field(
        default=None,
        ge=1,
        le=2**30,
        description="Most MiB of hidden states per round of pools.sharing=alternate. Default: a whole epoch, or half "
        "of the free disk. In memory (`arena`, `mooncake`) a round has `budget_mib`.",
    )
    folder: Address | None = Field(
        default=None,
        description="Folder of the hidden states; with `stored` also an s3:// URL. Default: shared memory, or the run "
        "folder if that is too small.",
    )
    address: str = Field(
        default="127.0.0.1",
        description="Address of the flow's machine in a private network of all machines. Mooncake's master is there, "
        "and trainer ranks of several machines meet in that network. `auto`: the one of its default route, as for a "
        "flow in a pod, whose address nobody knows before.",
    )
    protocol: Literal["auto", "rdma", "tcp"] = Field(
        default="auto",
        description="Mooncake: `auto` is RDMA if this machine has a device with an active port that can be opened.",
    )
    receive: Literal["auto", "host", "device"] = Field(
        default="auto",
        description="Where samples arrive at the trainer. `host`: pinned memory, all checksums verified. `device`: GPU "
        "memory by RDMA (GPUDirect), one sample in 16 verified. `auto`: `device` where it works.",
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
    experiment: str = Field(default="draftsmith", min_length=1, max_length=250, description="MLflow experiment.")
    dataset_mib: int = Field(
        default=4096,
        ge=0,
        le=2**26,
        description="Samples up to this size are copied to MLflow's artifact store, once for all runs that use them; "
        "of larger ones the address in the cache is noted.",
    )
    registered_model: str | None = Field(
        default=None,
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_. -]*$",
        max_length=200,
        description="Name of the registered model; default: draft-<recipe name>.",
    )
