"""One run's configuration: the recipe, and the flow's parameter. Imported everywhere; reaches pydantic only."""

import json
import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from infra.config import LedgerConfig, PoolsConfig, TrackingConfig, TransportConfig
from infra.planner.config import PlanConfig
from infra.refusal import Refusal
from infra.shareable import without_passwords
from models.benchmark.config import BenchmarkConfig, PromotionConfig
from models.capture.config import GeneratorConfig
from models.data.config import DataConfig
from models.drafts.config import METHODS, DraftConfig
from models.targets.config import TargetConfig
from models.training.config import TrainingConfig


class RunConfig(BaseModel):
    """Everything that decides a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(description="Recipe name; run folders and the registered model are named after it.")
    seed: int = 0
    target: TargetConfig
    data: DataConfig = DataConfig()
    generator: GeneratorConfig = GeneratorConfig()
    draft: DraftConfig
    training: TrainingConfig = TrainingConfig()
    benchmark: BenchmarkConfig = BenchmarkConfig()
    promotion: PromotionConfig = PromotionConfig()
    pools: PoolsConfig = PoolsConfig()
    ledger: LedgerConfig = LedgerConfig()
    transport: TransportConfig = TransportConfig()
    tracking: TrackingConfig = TrackingConfig()
    plan: PlanConfig = PlanConfig()

    @model_validator(mode="after")
    def _consistent(self) -> "RunConfig":
        if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", self.name):
            raise Refusal(f"name {self.name!r} becomes a folder: use lower-case letters, digits, dots and dashes")
        ids = self.target.aux_layer_ids
        if list(ids) != sorted(set(ids)) or ids[0] < 0:
            raise Refusal(f"target.aux_layer_ids {list(ids)} must be ascending, distinct and not negative")
        if self.benchmark.lookahead > self.benchmark.max_lookahead:
            raise Refusal("benchmark.lookahead must not exceed benchmark.max_lookahead")
        transport = self.transport
        if self.pools.kind != "local" and (
            transport.kind == "arena" or (transport.kind in ("auto", "files") and transport.folder is None)
        ):
            raise Refusal(
                f"pools.kind={self.pools.kind} may put generators and trainer on different machines, and shared memory "
                "is of one: set transport.kind=mooncake (or transport.folder to a folder that all machines share)"
            )
        if self.training.context_parallel_size > 1:
            self._check_shared_samples()
        gpus, ranks = self.pools.training_gpus, self.training.ranks
        if gpus not in (0, ranks):
            raise Refusal(
                f"pools.training_gpus is {gpus}, training.ranks {ranks}: a rank needs one GPU, so make them equal (or "
                "set it to 0 for the CPU)"
            )
        return self

    def _check_shared_samples(self) -> None:
        size = self.training.context_parallel_size
        if not self.draft.shareable:
            raise Refusal(
                f"training.context_parallel_size is {size}: a block of {self.draft.title} reads the features of its "
                "whole sample, so ranks cannot share one: set it to 1 and lower data.max_tokens, or use "
                "draft.method=eagle3"
            )
        if self.transport.receive == "device":
            raise Refusal(
                f"training.context_parallel_size is {size}: by GPUDirect (transport.receive=device) samples arrive "
                "whole, and ranks that share them want parts: set transport.receive=host"
            )


def load_recipe(path: Path, overrides: list[str] | None = None) -> RunConfig:
    """Read a recipe and apply `section.field=value` overrides (values are YAML).

    Raises Refusal, with the place and the remedy, for anything that is not a valid recipe.
    """
    if not path.is_file():
        raise Refusal(f"no recipe at {path}: recipes lie in recipes/, for instance recipes/quickstart.yaml")
    try:
        tree = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise Refusal(f"{path} is not valid YAML: {error}") from error
    if not isinstance(tree, dict):
        raise Refusal(f"{path} holds no settings: a recipe is a YAML mapping with at least name, target and draft")
    for override in overrides or []:
        _apply(tree, override)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise Refusal(_explain(str(path), error)) from error


def read_config(path: Path) -> RunConfig:
    """A run's own configuration, `config.json`; Refusal for a damaged one, or one that this version cannot run."""
    try:
        tree = json.loads(path.read_text())
    except ValueError as error:  # no JSON, or no text at all
        raise Refusal(
            f"{path} is damaged: {error}. It is the only record of what the run was asked for: put it back from a "
            "backup, or start a new run"
        ) from error
    try:
        return RunConfig.model_validate_json(json.dumps(tree))
    except ValidationError as error:
        raise Refusal(
            f"{_explain(str(path), error)}\nThe run was made by another version of Draftsmith: use that one, or "
            "start a new run"
        ) from error


SECTIONS_OF_PLACEMENT = ("pools", "plan")
PLACEMENT = frozenset(
    {
        "training.ranks",
        "training.context_parallel_size",
        "training.micro_batches",
        "generator.count",
        "generator.max_count",
        "generator.patience_s",
        "ledger.max_quarantined",
    }
)
"""Settings that a resumed run may change, like all of `pools` and `plan`: they decide where it runs, what is assumed of
that, or when it gives up, not what it trains."""


def with_overrides(config: RunConfig, overrides: list[str]) -> RunConfig:
    """A run's configuration with another placement; Refusal for an override of anything else."""
    tree = config.model_dump(mode="json")
    for override in overrides:
        setting = override.partition("=")[0]
        if setting not in PLACEMENT and setting.partition(".")[0] not in SECTIONS_OF_PLACEMENT:
            raise Refusal(
                f"override {without_passwords(override)!r}: a run is resumed with its own configuration; leave it out, "
                f"or start a new run (these may change: {', '.join(sorted(PLACEMENT))}, and all of "
                f"{' and '.join(SECTIONS_OF_PLACEMENT)})"
            )
        _apply(tree, override)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise Refusal(_explain("the run's configuration", error)) from error


def without_placement(config: RunConfig) -> dict[str, Any]:
    """What two configurations must share to be of the same run."""
    tree = config.model_dump(mode="json", exclude=set(SECTIONS_OF_PLACEMENT))
    for setting in PLACEMENT:
        section, _, field = setting.partition(".")
        del tree[section][field]
    return tree


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not equals or not key:
        raise Refusal(f"override {without_passwords(override)!r} is not of the form section.field=value")
    *sections, field = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise Refusal(f"override {without_passwords(override)!r}: {section} is a value, not a section")
    tree[field] = yaml.safe_load(value)


def _without_method(place: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Where a person finds a setting: pydantic names the method among the sections."""
    return place[:1] + place[2:] if place[:1] == ("draft",) and place[1:2] and place[1] in METHODS else place


def _explain(what: str, error: ValidationError) -> str:
    lines = [f"{what} is not valid:"]
    for problem in error.errors():
        place = ".".join(str(part) for part in _without_method(problem["loc"])) or "recipe"
        if problem["type"] == "extra_forbidden":
            lines.append(f"  {place}: no such setting")
        elif problem["type"].startswith("union_tag"):
            got = without_passwords(repr(problem.get("ctx", {}).get("tag")))
            lines.append(f"  {place}.method: known methods are {', '.join(METHODS)} (got {got})")
        else:
            got = without_passwords(repr(problem["input"]))  # before it is cut
            lines.append(f"  {place}: {problem['msg'].removeprefix('Value error, ')} (got {got:.80})")
    return str(without_passwords("\n".join(lines)))
