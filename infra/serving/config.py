"""Settings of the serving follower: the YAML file of `draftsmith serve-follow`."""

import shlex
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import ConfigDict, Field, model_validator

from infra.config import Address, Seconds, Share, StrictConfig
from infra.refusal import Refusal

GpuName = Annotated[int, Field(ge=0, le=4096)] | Annotated[str, Field(pattern=r"^(GPU|MIG)-[0-9A-Za-z/-]+$")]
"""Position in PCI order, or UUID or its beginning."""


class ServerConfig(StrictConfig):
    """One SGLang server."""

    url: Address = Field(description="The server's own address, for instance http://127.0.0.1:30000; not a gateway's.")
    command: str | None = Field(
        default=None,
        description="Command line that starts the server, without a draft's arguments. The follower starts and stops "
        "it; the server outlives the follower.",
    )
    restart: str | None = Field(
        default=None,
        description="In place of `command`, for servers that something else runs (systemd, a container): a command "
        "that starts the server, again if it runs. The draft's arguments are in FOLDER/servers/HOST-PORT.env as "
        "DRAFT_ARGUMENTS.",
    )
    gpus: tuple[GpuName, ...] = Field(
        default=(),
        description="The server's GPUs on this machine, by position in PCI order or by UUID. `command` gets them as "
        "CUDA_VISIBLE_DEVICES, and no run leases them while the follower runs. Default: what `command` sees, and "
        "nothing is kept from runs.",
    )

    @model_validator(mode="after")
    def _one_way_to_start(self) -> Self:
        place = urlsplit(self.url)
        if place.scheme not in ("http", "https") or not place.hostname:
            raise Refusal(f"servers: {self.url!r} is no address of a server: write http://HOST:PORT")
        if (self.command is None) == (self.restart is None):
            raise Refusal(f"servers: {self.url} needs either `command` or `restart`")
        for text in filter(None, (self.command, self.restart)):
            try:
                words = shlex.split(text)
            except ValueError as error:
                raise Refusal(f"servers: the command of {self.url} cannot be read ({error}): {text}") from error
            if not words:
                raise Refusal(f"servers: the command of {self.url} is empty")
            draft = next((word for word in words if word.startswith("--speculative-draft-model-path")), None)
            if draft is not None and self.command is not None:
                raise Refusal(f"servers: leave {draft} out of the command of {self.url}: the follower adds the draft")
        return self

    @property
    def name(self) -> str:
        """Of its files: HOST-PORT."""
        place = urlsplit(self.url)
        return f"{place.hostname}-{place.port or (443 if place.scheme == 'https' else 80)}"


class CanaryConfig(StrictConfig):
    """The servers that try a new version first."""

    share: Share = Field(default=0.25, description="Share of the servers that try a new version; at least one does.")
    steps: int = Field(
        default=2000,
        ge=0,
        le=1_000_000_000,
        description="Verification steps of live traffic over which a new version must hold its acceptance.",
    )
    wait_s: float = Field(
        default=900.0,
        ge=0,
        le=1_000_000_000,
        description="Seconds after which a version is judged by the traffic that it had, however little.",
    )
    max_loss: float = Field(
        default=0.05,
        gt=0,
        lt=1,
        description="A version goes back if it accepts less than before by more than this share, and not by chance.",
    )


class FollowConfig(StrictConfig):
    """The servers of one draft on one machine, or with one shared folder."""

    model_config = ConfigDict(title="Follow")

    draft: str = Field(min_length=1, max_length=200, description="Registered model that the servers run.")
    tracking_uri: Address | None = Field(default=None, description="MLflow; default: $MLFLOW_TRACKING_URI.")
    folder: str = Field(
        min_length=1,
        description="Folder for the drafts (FOLDER/DRAFT/VERSION), logs and the follower's state; servers read it.",
    )
    servers: tuple[ServerConfig, ...] = Field(min_length=1, description="The servers; the first ones are canaries.")
    min_healthy: int | None = Field(
        default=None,
        ge=0,
        le=4096,
        description="A server is stopped only while this many others are healthy. Default: all others.",
    )
    canary: CanaryConfig = Field(default=CanaryConfig(), description="How a new version is tried.")
    arguments: tuple[str, ...] | None = Field(
        default=None,
        description="SGLang's arguments for the draft, but for its path. Default: what the version's benchmark found "
        "best (serving/sglang.json).",
    )
    adaptive: bool = Field(
        default=False,
        description="Use the version's arguments for a changing load (--speculative-adaptive) where it has any, in "
        "place of those for its main load.",
    )
    swap: bool = Field(
        default=True,
        description="Load a version's weights into running servers where that is exact: it differs from the version "
        "before it in its weights alone. Otherwise, and with false, servers are restarted.",
    )
    poll_s: Seconds = Field(default=10.0, description="Seconds between two looks at registry and servers.")
    start_timeout_s: Seconds = Field(default=900.0, description="Seconds until a started server must be healthy.")
    drain_s: float = Field(
        default=60.0, ge=0, le=86_400, description="Seconds for the requests of a server that is being stopped."
    )
    unhealthy_s: Seconds = Field(
        default=60.0, description="A server that was healthy is started again after failing so long."
    )

    @model_validator(mode="after")
    def _checked(self) -> Self:
        urls = [server.url.rstrip("/") for server in self.servers]
        if twice := sorted({url for url in urls if urls.count(url) > 1}):
            raise Refusal(f"servers: {', '.join(twice)} is there twice")
        if self.min_healthy is not None and self.min_healthy >= len(self.servers):
            raise Refusal(
                f"min_healthy={self.min_healthy}: with {len(self.servers)} servers no version could ever be replaced; "
                f"at most {len(self.servers) - 1}"
            )
        return self

    @property
    def healthy_others(self) -> int:
        """Healthy servers that must be left while one is replaced."""
        return len(self.servers) - 1 if self.min_healthy is None else self.min_healthy
