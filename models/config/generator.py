"""How generators capture hidden states."""

from typing import Literal, Self

from pydantic import Field, model_validator

from infra.config import Count, Seconds, StrictConfig
from infra.planner.traffic import StoredPrecision
from infra.redaction import redacted
from infra.refusal import Refusal
from infra.sglang.config import SGLangConfig
from models.config.live import LiveConfig


class GeneratorConfig(StrictConfig):
    """Target prefill and capture."""

    engine: Literal["transformers", "sglang", "serving"] = Field(
        default="transformers",
        description="What runs the target; `sglang`: one server per generator; `serving`: the servers of "
        "generator.live, which serve users and hand over a share of what they were asked. Default in a recipe file: "
        "`sglang` if `pools.inference_gpus` is set.",
    )
    live: LiveConfig | None = Field(default=None, description="Settings of engine=serving.")
    count: Count = Field(
        default=1,
        description="Generator processes per run, among which `pools.inference_gpus` are divided. A recipe file with "
        "engine=transformers may leave it to them: one on each.",
    )
    max_count: Count | None = Field(
        default=None,
        description="Generators are added up to this number while inference is the bottleneck, each on its own "
        "devices, and removed again afterwards; not with pools.sharing=alternate. Default: `count`.",
    )
    patience_s: Seconds = Field(default=120.0, description="Seconds of one bottleneck before the number changes.")
    compute_dtype: Literal["float32", "bfloat16"] | None = Field(
        default=None,
        description="Data type of the target. Default: bfloat16 with `pools.inference_gpus` and on processors that are "
        "faster in it (Intel's with AMX, AMD's with AVX-512 BF16), float32 on others. With engine=serving it is the "
        "servers', bfloat16 by default.",
    )
    stored_dtype: StoredPrecision = Field(
        default="bfloat16",
        description="Data type of hidden states on their way to the trainer. `float8`: e4m3 with a scale for each "
        "token and layer, half the bytes of bfloat16.",
    )
    lease_samples: Count | None = Field(
        default=None,
        description="Samples leased, and published, per ledger transaction. Default: as many as there are generators, "
        "which take turns at the ledger; at least 8, at most 32.",
    )
    threads: Count | None = Field(
        default=None,
        description="CPU threads per generator. Default: an equal share of the cores, or of half of them where "
        "training has no GPUs either.",
    )
    sglang: SGLangConfig = Field(default=SGLangConfig(), description="Settings of the SGLang servers.")

    @property
    def in_flight(self) -> int:
        """Samples that one generator captures at the same time."""
        return self.sglang.requests_in_flight if self.engine == "sglang" else 1  # users come first

    @property
    def slots(self) -> int:
        """Samples that all generators together hold at most: leased, and in the engine."""
        return self.most * (self.leased + self.in_flight)

    @property
    def leased(self) -> int:
        """Samples that a generator leases at a time."""
        return self.lease_samples or max(8, min(32, self.most))

    @property
    def most(self) -> int:
        """Largest number of generators."""
        return self.max_count or self.count

    @model_validator(mode="after")
    def _no_secret_argument(self) -> Self:
        if redacted(self.sglang.arguments) != list(self.sglang.arguments):
            raise Refusal(
                "generator.sglang.arguments hold a secret, and a recipe is kept with its runs and shown in pages: "
                "leave it out, because the server listens on loopback alone; or write `api-key: ...` into a YAML file "
                "that only you can read, add --config with its path to the arguments, and set "
                "$DRAFTSMITH_SGLANG_API_KEY to the key"
            )
        return self

    @model_validator(mode="after")
    def _one_for_each_server(self) -> Self:
        if (self.live is None) == (self.engine == "serving"):
            raise Refusal(
                f"generator.engine is {self.engine}, and generator.live is {'not ' if self.live is None else ''}set: "
                "to learn from servers that have users, set engine=serving and live; otherwise neither"
            )
        if self.live is not None and not self.count == self.most == len(self.live.servers):
            raise Refusal(
                f"generator.live names {len(self.live.servers)} servers, and each has one generator: set "
                f"generator.count to {len(self.live.servers)}, and leave generator.max_count out"
            )
        return self

    @model_validator(mode="after")
    def _room_for_all(self) -> Self:
        if self.most < self.count:
            raise Refusal(
                f"max_count is {self.max_count} and count {self.count}: a run begins with count generators, so raise "
                "max_count to it, or leave it out"
            )
        return self
