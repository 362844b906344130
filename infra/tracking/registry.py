"""The model registry: versions of a draft, the one in service (`champion`), the newest one (`challenger`), decisions.

Nothing here changes which version serves: `infra.tracking.promotion` does. Every decision is a tag of the version that
it is about, so the history lives as long as the registry.
"""

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from mlflow import MlflowClient, artifacts
from mlflow.entities.model_registry import ModelVersion, RegisteredModel
from mlflow.exceptions import MlflowException
from pydantic import ValidationError

from infra.records.acceptance import RegisteredDraft, RequestCounts
from infra.records.data_path import Record
from infra.refusal import Refusal
from infra.tracking.client import NOTE, connect, find_model, get_model, model_versions, pages

MARK, DRAFT = "draftsmith", "draft"
"""Tag of the registered models that are Draftsmith's, among those of others in the same registry."""
MADE_BY, PREFIX = "made by Draftsmith", "draft-"
"""Part of the description, and of the default name, of those whose latest run set no tag: earlier versions did not."""
CHAMPION = "champion"
CHALLENGER = "challenger"
REPLACES = "replaces"
"""Tag of the champion: the version it replaced, which a rollback restores; empty if there was none."""
MEASURED_AGAINST = "measured_against"
"""Tag: the champion at the time of this version's benchmark; empty if there was none."""
SMOKE_TEST = "smoke_test"
"""Tag of a version that was put into service: the outcome of its smoke test."""
REFUSED = "refused"
"""Tag of a version that was not promoted: the reason."""
GATE = "gate"
"""Tag, `passed` or `not passed`."""
UNPROVEN = "unproven"
"""Tag, `true` or `false`: the benchmark found the version ahead of every rival, by too little to be sure."""
RUN = "run"
WEIGHTS_SHA256 = "weights_sha256"
"""Tag: hash of the export's weights, by which a served draft is recognised."""
TRAFFIC = "traffic"
"""Tag: whether the acceptance length is of `greedy` or of `sampled` text."""
COUNTED_BY = "counted_by"
"""Tag: the engine whose decoding the acceptance length is of."""
GPU_HOURS, GPU_BUSY, COST = "gpu_hours", "gpu_busy", "cost"
"""What the version's run has taken until it was registered, in GPU-hours, in which share of them a kernel ran, if that
was measured, and, with a price, in dollars."""
GOODPUT = "goodput"
"""Tag: tokens per second that the benchmark predicts at its main load, for people."""
QUANTIZATION = "target_quantization"
"""Tag: how the target was quantized; empty: not at all."""
KERNELS = "capture_kernels"
"""Tag: the engine that captured hidden states, and its kernels."""
MODEL_ID = "model_id"
ACCEPTANCE = "acceptance_length"
BENCHMARK = "benchmark"
"""Folder of artifacts of a version's run."""
REQUEST_COUNTS = f"{BENCHMARK}/request_counts.json"
EVIDENCE = f"{BENCHMARK}/gate.json"
CONFIG = "config.json"
"""Artifact: the recipe, without passwords."""
VERSIONS_OF_MODEL = "mlflow.modelVersions"
"""MLflow's own tag, by which a logged model's page shows its versions."""

DESCRIPTION = 5000
"""Characters of a description that fit MLflow's column. PostgreSQL refuses more; SQLite takes any length."""
REST = "\n\nThe rest is in `report.html`, an artifact of the version's run."
DECISION = "decision."
LONGEST = 2500
"""Characters of a reason that are kept. MLflow takes 5,000 in a tag, and JSON may escape each character."""

Outcome = Literal["promoted", "refused", "rolled back", "superseded", "unreadable"]


class PromotionDecision(Record):
    """One decision about one version."""

    at: float
    """Seconds since 1970."""
    version: int
    outcome: Outcome
    """`superseded`: another decision overtook this one before it took effect. `unreadable`: it was edited in MLflow."""
    champion_before: int | None
    champion_after: int | None = None
    by: str
    """`gate`, `smoke test`, `served traffic`, `outside Draftsmith`, or a person."""
    reason: str
    run: str = ""
    """Name of the run that decided; empty for a decision by command."""


def register(
    uri: str, name: str, model_id: str, run_id: str, tags: Mapping[str, str], *, about: str = "", description: str = ""
) -> RegisteredDraft:
    """Register a logged model as the next version of `name`, and make it the challenger.

    A run registers one version: called again with the same tag `run`, it completes the version that is there.

    Args:
        about: description of the registered model, Markdown.
        description: of this version, Markdown; one too long for MLflow ends after its last line that fits.
    """
    client, description = connect(uri), _that_fits(description)
    model = get_model(client, name)
    if model is None:
        client.create_registered_model(name, {MARK: DRAFT}, about)
    elif MARK not in model.tags:
        client.set_registered_model_tag(name, MARK, DRAFT)
    version = _version_of_run(client, name, tags.get(RUN))
    if version is None:
        tags = {**tags, MODEL_ID: model_id}
        made = client.create_model_version(
            name, f"models:/{model_id}", run_id, tags=tags, description=description, model_id=model_id
        )
        version = _version_of_run(client, name, tags.get(RUN)) or made
    versions = json.dumps([{"name": name, "version": str(version.version)}])
    # The version's own model: a repeated call may have logged another one.
    client.set_logged_model_tags(version.tags.get(MODEL_ID, model_id), {VERSIONS_OF_MODEL: versions, NOTE: description})
    _make_challenger(client, name, int(version.version))
    return _draft(client, name, int(version.version))


def _that_fits(description: str) -> str:
    if len(description) <= DESCRIPTION:
        return description
    return description[: DESCRIPTION - len(REST) + 1].rpartition("\n")[0].rstrip() + REST


def _make_challenger(client: MlflowClient, name: str, version: int) -> None:
    """Set the alias, unless the version was decided on or a newer one has it."""
    aliases = find_model(client, name).aliases
    decided = any(decision.version == version for decision in decisions(client, name))
    if not decided and version > int(aliases.get(CHALLENGER, 0)) and str(aliases.get(CHAMPION)) != str(version):
        client.set_registered_model_alias(name, CHALLENGER, str(version))


def champion(uri: str, name: str) -> RegisteredDraft | None:
    """The champion, or None."""
    client = connect(uri)
    model = get_model(client, name)
    if model is None or CHAMPION not in model.aliases:
        return None
    return _draft(client, name, int(model.aliases[CHAMPION]))


def furthest(uri: str, name: str) -> RegisteredDraft | None:
    """What training goes on from: the challenger while it is ahead of the present champion, though not surely or not
    yet approved, else the champion, or None."""
    serves = champion(uri, name)
    against = str(serves.version) if serves else ""
    waiting = (one for one in list_drafts(uri, name) if CHALLENGER in one.aliases and _is_ahead(one))
    return next((one for one in waiting if one.tags.get(MEASURED_AGAINST) == against), serves)


def _is_ahead(draft: RegisteredDraft) -> bool:
    awaits_approval = draft.tags.get(GATE) == "passed" and REFUSED not in draft.tags
    return awaits_approval or draft.tags.get(UNPROVEN) == "true"


def find_version(uri: str, name: str, version: int) -> RegisteredDraft:
    """One version. Raises Refusal if it does not exist."""
    return _draft(connect(uri), name, version)


def version_of_run(uri: str, name: str, run: str) -> RegisteredDraft | None:
    """The version that this run registered, or None."""
    client = connect(uri)
    version = _version_of_run(client, name, run)
    return _draft(client, name, int(version.version)) if version else None


def _version_of_run(client: MlflowClient, name: str, run: str | None) -> ModelVersion | None:
    """The version that a run registered, if it did.

    MLflow's client repeats a request whose answer was lost, so there may be several: the first one stays, and any that
    has an alias or was decided on.
    """
    if not run or (model := get_model(client, name)) is None:
        return None
    same = sorted(
        (version for version in model_versions(client, name) if version.tags.get(RUN) == run),
        key=lambda version: int(version.version),
    )
    if len(same) < 2:
        return next(iter(same), None)
    used = {str(version) for version in model.aliases.values()}
    used |= {str(decision.version) for decision in decisions(client, name)}
    kept = [version for version in same if str(version.version) in used] or same[:1]
    for version in same:
        if version not in kept:
            client.delete_model_version(name, str(version.version))
    return kept[0]


def list_drafts(uri: str, name: str | None = None) -> list[RegisteredDraft]:
    """All versions of all drafts (or of one), newest first; none of registered models that are not Draftsmith's."""
    client = connect(uri)
    if name is None:
        queries = f"tags.`{MARK}` = '{DRAFT}'", f"name LIKE '{PREFIX}%'"
        found = [model for query in queries for model in pages(client.search_registered_models, filter_string=query)]
        models = {str(model.name): model for model in found if _is_ours(model)}.values()
    else:
        models = [model for model in [get_model(client, name)] if model and _is_ours(model)]
    drafts: list[RegisteredDraft] = []
    for model in models:
        aliases = {alias: int(version) for alias, version in model.aliases.items()}
        drafts += [_record(version, aliases) for version in model_versions(client, str(model.name))]
    return drafts


def _is_ours(model: RegisteredModel) -> bool:
    return MARK in model.tags or MADE_BY in (model.description or "")


def download(uri: str, draft: RegisteredDraft, folder: Path) -> Path:
    """Copy a version's export into `folder`, which must be missing or empty, whole or not at all."""
    aside = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    source = f"models:/{draft.model_id}"
    uri = connect(uri).tracking_uri
    artifacts.download_artifacts(artifact_uri=source, dst_path=str(aside), tracking_uri=uri, registry_uri=uri)
    return aside.replace(folder)


def describe(uri: str, draft: RegisteredDraft) -> str:
    """The version's description, Markdown."""
    return str(connect(uri).get_model_version(draft.name, str(draft.version)).description or "")


def read_request_counts(uri: str, draft: RegisteredDraft) -> RequestCounts:
    """Counts of every conversation of a version's benchmark. Raises Refusal if the version has none."""
    return RequestCounts.model_validate_json(read_artifact(uri, draft, REQUEST_COUNTS))


def read_artifact(uri: str, draft: RegisteredDraft, path: str) -> str:
    """A text that the version's run has logged. Raises Refusal for a version without it."""
    client = connect(uri)
    run_id = str(client.get_model_version(draft.name, str(draft.version)).run_id)
    folder = path.rpartition("/")[0] or None
    try:
        paths = {artifact.path for artifact in client.list_artifacts(run_id, folder)}
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        paths = set()
    if path not in paths:
        raise Refusal(
            f"the run of version {draft.version} of {draft.name} has no {path}: it was deleted in MLflow, or made by "
            "another version of Draftsmith, so retrain it"
        )
    with TemporaryDirectory(prefix="draftsmith-") as copy:
        return Path(client.download_artifacts(run_id, path, copy)).read_text()


def _draft(client: MlflowClient, name: str, version: int) -> RegisteredDraft:
    try:
        found = client.get_model_version(name, str(version))
        aliases = client.get_registered_model(name).aliases
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        raise Refusal(f"{name} has no version {version}: `draftsmith drafts list` shows what there is") from error
    return _record(found, {alias: int(number) for alias, number in aliases.items()})


def _record(version: ModelVersion, aliases: Mapping[str, int]) -> RegisteredDraft:
    tags = dict(version.tags)
    number = int(version.version)
    return RegisteredDraft(
        name=str(version.name),
        version=number,
        model_id=tags.get(MODEL_ID, ""),
        aliases=tuple(sorted(alias for alias, of in aliases.items() if of == number)),
        acceptance_length=number_in(tags, ACCEPTANCE),
        tags=tags,
    )


def number_in(tags: Mapping[str, str], tag: str) -> float | None:
    """The number that a tag holds; None for one that is missing, or that a person has edited into something else."""
    return _number(tags.get(tag, ""))


def _number(text: str) -> float | None:
    try:
        found = float(text)
    except ValueError:
        return None
    return found if math.isfinite(found) else None


def write_decision(client: MlflowClient, name: str, decision: PromotionDecision, key: str) -> None:
    """Add a decision to the history. Writing it again under the same key changes nothing."""
    shortened = decision.model_copy(update={"reason": decision.reason[:LONGEST]})
    client.set_model_version_tag(name, str(decision.version), DECISION + key, shortened.model_dump_json())


def decisions(client: MlflowClient, name: str) -> list[PromotionDecision]:
    """All decisions about the versions of a registered model, oldest first. Raises Refusal for one that was edited."""
    read = [(version, tag, _decision(version, tag, text)) for version, tag, text in _written(client, name)]
    for version, tag, decision in read:
        if decision.outcome == "unreadable":
            raise Refusal(
                f"version {version} of {name}: the tag {tag} was edited, and no decision can be read from it: delete "
                f"it in MLflow's page (to keep the text, under a name that does not begin with {DECISION!r})"
            )
    return sorted((decision for _, _, decision in read), key=lambda decision: decision.at)


def history(uri: str, name: str) -> list[PromotionDecision]:
    """The same to be shown: one that was edited is `unreadable`, with its text as the reason.

    Raises Refusal for a draft that is not registered.
    """
    client = connect(uri)
    find_model(client, name)
    return sorted((_decision(*written) for written in _written(client, name)), key=lambda decision: decision.at)


def _written(client: MlflowClient, name: str) -> Iterator[tuple[int, str, str]]:
    """Version, tag and text of every decision."""
    for version in model_versions(client, name):
        for tag, text in version.tags.items():
            if tag.startswith(DECISION):
                yield int(version.version), tag, text


def _decision(version: int, tag: str, text: str) -> PromotionDecision:
    try:
        return PromotionDecision.model_validate_json(text)
    except ValidationError:
        milliseconds = _number(tag.removeprefix(DECISION).partition(".")[0])
        return PromotionDecision(
            at=(milliseconds or 0.0) / 1000, version=version, outcome="unreadable", champion_before=None, by="",
            reason=f"the tag {tag} was edited: {text}",
        )  # fmt: skip
