"""One run's configuration: the recipe, which is also the flow's parameter."""

import json
import re
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from reprlib import Repr
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from infra.config import LONGEST_TEXT, LedgerConfig, PoolsConfig, Seed, StrictConfig, TrackingConfig, TransportConfig
from infra.files.yaml_file import parse_yaml, read_yaml
from infra.planner.config import PlanConfig
from infra.planner.shapes import Precision
from infra.redaction import redacted
from infra.refusal import Refusal
from models.config.benchmark import BenchmarkConfig, PromotionConfig
from models.config.data import LIVE, DataConfig
from models.config.draft import METHODS, DraftConfig
from models.config.generator import GeneratorConfig
from models.config.machine import with_all_gpus_used, with_fast_arithmetic
from models.config.several_machines import check_machines
from models.config.target import TargetConfig
from models.config.target_settings import LAYER_FIELDS, completed
from models.config.training import TrainingConfig

SILENCE_S = 30 * 86_400.0
FILLED_IN = (("draft",), ("target", "aux_layer_ids"))
"""A recipe may leave these out: a valid target supplies them."""
LISTED = 20
"""Most problems of a recipe in one message."""


class RunConfig(StrictConfig):
    """All settings of a run."""

    name: str = Field(description="Recipe name; run folders and the registered model are named after it.")
    seed: Seed = Field(
        default=0,
        description="Seed of initial weights, sample order, the benchmark's sampling, and regenerated text with "
        "generator.engine=transformers. SGLang samples text by a seed of its own; another `seed` makes it answer "
        "again.",
    )
    target: TargetConfig = Field(description="The served LLM whose draft is trained.")
    data: DataConfig = Field(default=DataConfig(), description="Which text becomes samples, and how.")
    generator: GeneratorConfig = Field(default=GeneratorConfig(), description="How hidden states are captured.")
    draft: DraftConfig = Field(description="Draft method and its settings; a recipe file may leave them to the target.")
    training: TrainingConfig = Field(default=TrainingConfig(), description="How the draft is optimized.")
    benchmark: BenchmarkConfig = Field(default=BenchmarkConfig(), description="How acceptance and speed are measured.")
    promotion: PromotionConfig = Field(default=PromotionConfig(), description="The gate between draft and champion.")
    pools: PoolsConfig = Field(default=PoolsConfig(), description="Where generators and trainer ranks run.")
    ledger: LedgerConfig = Field(default=LedgerConfig(), description="The durable record of every sample.")
    transport: TransportConfig = Field(default=TransportConfig(), description="What carries hidden states.")
    tracking: TrackingConfig = Field(default=TrackingConfig(), description="MLflow.")
    plan: PlanConfig = Field(default=PlanConfig(), description="Assumptions of --plan; they never change a run.")

    @model_validator(mode="after")
    def _consistent(self) -> "RunConfig":
        if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,99}", self.name):
            raise Refusal(
                f"name {self.name[:200]!r} becomes a folder: use lower-case letters, digits, dots and dashes, "
                "100 at most"
            )
        ids = self.target.aux_layer_ids
        if list(ids) != sorted(set(ids)):
            raise Refusal(f"target.aux_layer_ids {list(ids)} must be ascending and distinct")
        if bool(ids) != self.draft.reads_layers:
            raise Refusal(
                f"target.aux_layer_ids {list(ids)}: drafts of {self.draft.title} read "
                + ("target layers, name at least one" if self.draft.reads_layers else "none, set it to []")
            )
        if self.plan.target is not None:
            check_layers(ids, self.plan.target.num_layers)
        if self.benchmark.lookahead > self.benchmark.max_lookahead:
            raise Refusal(
                f"benchmark.lookahead {self.benchmark.lookahead} must not exceed benchmark.max_lookahead "
                f"{self.benchmark.max_lookahead}: lower it, or raise that"
            )
        if stray := sorted({*(self.promotion.traffic.loads or ())} - {*self.benchmark.loads}):
            raise Refusal(
                f"promotion.traffic.loads {stray} must be among benchmark.loads {list(self.benchmark.loads)}, at which "
                "steps are timed: add them there"
            )
        transport = self.transport
        if self.pools.kind != "local" and (
            transport.kind == "arena" or (transport.kind in ("auto", "files") and transport.folder is None)
        ):
            raise Refusal(
                f"pools.kind={self.pools.kind} may put generators and trainer on different machines, and shared memory "
                "is of one: set transport.kind=mooncake (or transport.folder to a folder that all machines share)"
            )
        self._check_sharing()
        self._check_images()
        self._check_one_pass()
        if self.training.context_parallel_size > 1:
            self._check_shared_samples()
        if self.own_engine == "sglang" and self.pools.inference_gpus:
            self._check_served_dtypes()
        gpus, ranks = self.pools.training_gpus, self.training.ranks
        if gpus not in (0, ranks):
            raise Refusal(
                f"pools.training_gpus is {gpus}, training.ranks {ranks}: a rank needs one GPU, so make them equal (or "
                "set it to 0 for the CPU)"
            )
        check_machines(self.pools, self.training, self.generator)
        return self

    @property
    def draft_name(self) -> str:
        """The registered model of its drafts."""
        return self.tracking.registered_model or f"draft-{self.name}"

    @property
    def capture_dtype(self) -> Precision:
        """Data type of the target that is captured. Many CPUs are slower in bfloat16, up to several times; servers that
        have users run in it by default."""
        half = self.pools.inference_gpus or self.generator.engine == "serving"
        return self.generator.compute_dtype or ("bfloat16" if half else "float32")

    @property
    def training_dtype(self) -> Precision:
        """Data type of the training's arithmetic."""
        return self.training.precision or ("bfloat16" if self.pools.training_gpus else "float32")

    @property
    def benchmark_dtype(self) -> Precision:
        """Data type of target and draft in the benchmark."""
        return self.benchmark.compute_dtype or (self.capture_dtype if self.pools.inference_gpus else "float32")

    @property
    def own_engine(self) -> Literal["transformers", "sglang"]:
        """What runs the target on the run's own devices, to capture or to benchmark: beside servers that have users
        SGLang, if there are GPUs for it."""
        if self.generator.engine == "serving":
            return "sglang" if self.pools.inference_gpus else "transformers"
        return self.generator.engine

    @property
    def stall_s(self) -> float:
        """Seconds without a sample after which a run gives up. Users may be silent for longer."""
        return SILENCE_S if self.generator.engine == "serving" else self.training.stall_s

    def served_quantization(self, checkpoint: str | None) -> str | None:
        """How the target is quantized in service: as its checkpoint is, else as SGLang does when it loads it."""
        return checkpoint or (self.generator.sglang.quantization if self.generator.engine != "transformers" else None)

    @property
    def gpus_per_copy(self) -> int:
        """GPUs that hold one copy of the target in SGLang; beside servers with users the run's own is the only one."""
        settings, generators = self.generator.sglang, 1 if self.generator.live else self.generator.count
        return settings.tensor_parallel or max(1, self.pools.inference_gpus // generators // settings.data_parallel)

    def _check_served_dtypes(self) -> None:
        self.generator.sglang.check_gpu_dtype(self.capture_dtype, "generator.compute_dtype")
        if self.benchmark.served_concurrency:
            self.generator.sglang.check_gpu_dtype(self.benchmark_dtype, "benchmark.compute_dtype")

    def _check_one_pass(self) -> None:
        if (self.data.source == LIVE) != (self.generator.engine == "serving"):
            raise Refusal(
                f"data.source is {self.data.source}, and generator.engine is {self.generator.engine}: to learn from "
                "servers that have users, set data.source=live and generator.engine=serving; otherwise neither"
            )
        if self.data.source == LIVE and (obstacle := self._obstacle_to_live()):
            raise Refusal(f"data.source=live: {obstacle}")
        if self.data.answered_before < 1 and self.transport.kind == "stored":
            raise Refusal(
                "data.regeneration.capture answers and captures in one pass, and transport.kind=stored finds captures "
                "by their text: leave one of them out"
            )

    def _obstacle_to_live(self) -> str:
        if self.transport.kind == "stored":
            return "transport.kind=stored would keep what users were answered: leave it out"
        if self.training.start_from is None:
            return (
                "set training.start_from=furthest (or champion): a run continues with the draft that the servers run, "
                "and with its vocabulary"
            )
        if self.training.epochs != 1:
            return (
                f"training.epochs={self.training.epochs} would have the servers read everything again: set it to 1, "
                "and raise data.max_samples"
            )
        if self.pools.kind != "local" or self.pools.sharing not in ("auto", "apart"):
            return (
                "generators stand beside the servers, on this machine, and share no GPU with the trainer: set "
                "pools.kind=local, and leave pools.sharing out"
            )
        return ""

    def _check_images(self) -> None:
        if self.embedded and (obstacle := self.draft.obstacle_to_images):
            raise Refusal(f"data.images: {obstacle}")

    @property
    def embedded(self) -> bool:
        """Whether generators send the embeddings that the target read: those of images are in no table."""
        return self.data.images is not None and self.draft.reads_embeddings

    def _check_sharing(self) -> None:
        pools = self.pools
        if pools.sharing in ("alternate", "share") and pools.kind != "local":
            raise Refusal(
                f"pools.sharing={pools.sharing} is for the GPUs of one machine, and pools.kind is {pools.kind}: start "
                "the run inside a job of that cluster with pools.kind=local, or leave pools.sharing out"
            )
        if pools.sharing == "share" and not (pools.inference_gpus and pools.training_gpus):
            raise Refusal(
                "pools.sharing=share divides the memory of GPUs, and a pool has none: set pools.inference_gpus and "
                "pools.training_gpus, or leave pools.sharing out"
            )

    def top_token(self, target_vocab_size: int) -> bool:
        """Whether generators send the target's top tokens, by which the trainer knows what a draft can express."""
        pruned = self.draft.vocabulary_size(target_vocab_size) < target_vocab_size
        # A serving engine is spared the product over the whole vocabulary.
        pruned = pruned and self.generator.engine != "serving"
        return pruned and self.training.out_of_vocabulary == "argmax"

    def whole_head(self, target_vocab_size: int) -> bool:
        """Whether the loss reads the target's head over the whole vocabulary."""
        return self.top_token(target_vocab_size) and self.draft.needs_mass

    def _check_shared_samples(self) -> None:
        size = self.training.context_parallel_size
        if not self.draft.shareable:
            raise Refusal(
                f"training.context_parallel_size is {size}: drafts of {self.draft.title} read features of the whole "
                "sample, so ranks cannot share one: set it to 1 and lower data.max_tokens, or use draft.method=eagle3"
            )
        if self.transport.receive == "device":
            raise Refusal(
                f"training.context_parallel_size is {size}: by GPUDirect (transport.receive=device) samples arrive "
                "whole, and ranks that share them want parts: set transport.receive=host"
            )


def check_layers(aux_layer_ids: Sequence[int], num_layers: int) -> None:
    """Raise Refusal for layers that a target of `num_layers` does not have."""
    if max(aux_layer_ids, default=-1) >= num_layers:
        raise Refusal(
            f"target.aux_layer_ids {list(aux_layer_ids)}: the target has layers 0..{num_layers - 1}; choose among these"
        )


def load_recipe(path: Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a recipe and apply `section.field=value` overrides, whose values are YAML. Raises Refusal if invalid."""
    such_as = "for instance recipes/quickstart.yaml of a checkout, or what `draftsmith init` writes"
    tree = read_yaml(path, "recipe", such_as)
    if not isinstance(tree, dict):
        raise Refusal(f"{path} holds no settings: a recipe is a YAML mapping with at least name and target")
    for override in overrides or []:
        _apply(tree, override)
    return as_recipe(tree, str(path))


def as_recipe(tree: dict[str, Any], place: str) -> RunConfig:
    """The recipe with what it leaves to target and devices. Raises Refusal, naming `place`, if it is not valid."""
    config = _validated(with_fast_arithmetic(with_all_gpus_used(completed(tree))), place)
    # Not of a run: earlier versions took it, and it had no effect.
    if config.training.recompute and not config.draft.recomputes:
        raise Refusal(
            f"{place}: training.recompute: drafts of {config.draft.title} recompute nothing, so leave it out; if "
            "memory is short, raise training.micro_batches or lower data.max_tokens"
        )
    return config


def _validated(tree: Any, place: str, remedy: str = "") -> RunConfig:
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise Refusal(_explain(place, error) + remedy) from error


def read_config(path: Path) -> RunConfig:
    """A run's `config.json`. Raises Refusal if it is damaged or from an incompatible version."""
    try:
        tree = json.loads(path.read_text())
    except OSError as error:
        raise Refusal(f"{path} cannot be read ({error.strerror}): restore it, or start a new run") from error
    except (ValueError, RecursionError) as error:  # no JSON, or no text at all
        raise Refusal(
            f"{path} is damaged: {error}. It is the only record of what the run was asked for: put it back from a "
            "backup, or start a new run"
        ) from error
    remedy = "restore it, use that version, or start a new run"
    return _validated(
        tree, str(path), f"\nThe file was changed, or another version of Draftsmith made the run: {remedy}"
    )


PLACEMENT: dict[str, Any] = {
    "pools": True,
    "plan": True,
    "training": {"ranks", "context_parallel_size", "micro_batches"},
    "generator": {"count", "max_count", "patience_s"},
    "ledger": {"max_quarantined"},
}
"""Settings that a resumed run may change, as pydantic's `exclude` takes them: they never change what is trained."""


def with_overrides(config: RunConfig, overrides: list[str]) -> RunConfig:
    """The configuration with overrides of placement. Raises Refusal for an override of anything else."""
    tree = config.model_dump(mode="json")
    for override in overrides:
        section, _, field = override.partition("=")[0].partition(".")
        fields = PLACEMENT.get(section, ())
        if fields is not True and field not in fields:
            names = sorted(f"{s}.{name}" for s, names in PLACEMENT.items() if names is not True for name in names)
            raise Refusal(
                f"override {redacted(override)!r}: a run is resumed with its own configuration; leave it out, "
                f"or start a new run (these may change: {', '.join(names)}, and all of pools and plan)"
            )
        _apply(tree, override)
    return _validated(tree, "the run's configuration")


def without_placement(config: RunConfig) -> dict[str, Any]:
    """The settings that a resumed run must share with the original."""
    return config.model_dump(mode="json", exclude=PLACEMENT)


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise Refusal(f"override {redacted(override)!r} is not of the form section.field=value: write it so")
    *sections, field = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise Refusal(f"override {redacted(override)!r}: {section} is a value, not a section: correct the name")
    tree[field] = parse_yaml(value, f"override {redacted(override)[:120]!r}")


def _without_method(place: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """The setting's place in the recipe; pydantic adds the draft method to it."""
    return place[:1] + place[2:] if place[:1] == ("draft",) and place[1:2] and place[1] in METHODS else place


def _explain(what: str, error: ValidationError) -> str:
    """Every problem with its place."""
    problems = error.errors()
    if any(problem["loc"][:1] == ("target",) and problem["loc"] not in FILLED_IN for problem in problems):
        problems = [one for one in problems if one["type"] != "missing" or not _is_filled_in(one["loc"])]
    lines = [f"{what} is not valid; correct these settings:"]
    for problem in problems[:LISTED]:
        place = ".".join(str(part)[:80] for part in _without_method(problem["loc"])) or "recipe"
        if problem["type"] == "extra_forbidden":
            lines.append(f"  {place}: no such setting{_meant(problem['loc'])}")
        elif problem["type"].startswith("union_tag"):
            got = redacted(repr(problem.get("ctx", {}).get("tag")))
            lines.append(f"  {place}.method: known methods are {', '.join(METHODS)} (got {got:.80})")
        else:
            message = problem["msg"].removeprefix("Value error, ")
            # A validator of several settings gets, and would show, all of them.
            shown = not (problem["type"] == "value_error" and isinstance(problem["input"], dict | StrictConfig))
            # Redacted before it is cut, or a secret that was cut would not be recognised.
            got = f" (got {redacted(_shown(problem['input'])):.80})" if shown else ""
            lines.append(f"  {place}: {message}{got}")
    if len(problems) > LISTED:
        lines.append(f"  and {len(problems) - LISTED} more")
    return "\n".join(lines)


def _is_filled_in(place: tuple[int | str, ...]) -> bool:
    return place in FILLED_IN or (place[0] == "draft" and place[-1] in (*LAYER_FIELDS, "family"))


def _shown(value: Any) -> str:
    """The value's repr, shortened: YAML aliases can make it huge."""
    brief = Repr()
    brief.maxstring = LONGEST_TEXT
    try:
        return brief.repr(value)
    except ValueError:  # an integer of more than 4,300 digits
        return f"a {type(value).__name__}"


def _meant(place: tuple[int | str, ...]) -> str:
    """A hint at a known setting with a similar name, or an empty string."""
    section: Any = RunConfig
    for part in place[:-1]:
        field = getattr(section, "model_fields", {}).get(part)
        section = METHODS.get(str(part)) if field is None else field.annotation
    close = get_close_matches(str(place[-1]), list(getattr(section, "model_fields", ())), n=1)
    return f"; did you mean {close[0]}?" if close else ""
