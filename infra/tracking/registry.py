"""The model registry: versions of a draft, which one serves (`champion`), which one wants to (`challenger`).

Used by the flow's process and the command line. A promoted version remembers in its tag `replaces` whom it followed:
that is what a rollback reads.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from mlflow import MlflowClient, artifacts
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException

from infra.refusal import Refusal
from infra.results import GateEvidence, RegisteredDraft, RequestCounts
from infra.tracking.client import NOTE, connect
from infra.tracking.decisions import LONGEST, write_decision

CHAMPION = "champion"
CHALLENGER = "challenger"
REPLACES = "replaces"
MEASURED_AGAINST = "measured_against"
"""Tag: the version that was champion when this one was benchmarked, or nothing."""
SMOKE_TEST = "smoke_test"
"""Tag of a version that was put into service: what the smoke test said."""
REFUSED = "refused"
"""Tag of a version that was not promoted: the reason."""
RUN = "run"
WEIGHTS_SHA256 = "weights_sha256"
"""Tag: hash of the export's weights, by which a served draft is recognised."""
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


def register(
    uri: str, name: str, model_id: str, run_id: str, tags: Mapping[str, str], *, about: str = "", description: str = ""
) -> RegisteredDraft:
    """Register a logged model as the next version of `name`, and make it the challenger.

    `about` describes all versions, `description` this one (Markdown).
    """
    client = connect(uri)
    if not _exists(client, name):
        client.create_registered_model(name, description=about)
    version = client.create_model_version(
        name,
        f"models:/{model_id}",
        run_id,
        tags={**tags, MODEL_ID: model_id},
        description=description,
        model_id=model_id,
    )
    versions = json.dumps([{"name": name, "version": str(version.version)}])
    client.set_logged_model_tags(model_id, {VERSIONS_OF_MODEL: versions, NOTE: description})
    client.set_registered_model_alias(name, CHALLENGER, str(version.version))
    return _draft(client, name, int(version.version))


def promote(uri: str, name: str, version: int, *, by: str, reason: str) -> RegisteredDraft:
    """Make a version the champion, and note who decided it and why. Promoting the present champion changes nothing."""
    client = connect(uri)
    draft = _draft(client, name, version)
    present = champion(uri, name)
    if present and present.version == version:
        return draft
    client.set_model_version_tag(name, str(version), REPLACES, str(present.version) if present else "")
    client.set_registered_model_alias(name, CHAMPION, str(version))
    if CHALLENGER in draft.aliases:
        client.delete_registered_model_alias(name, CHALLENGER)
    before = present.version if present else None
    write_decision(uri, name, version, "promoted", champion_before=before, by=by, reason=reason)
    return _draft(client, name, version)


def withdraw(uri: str, draft: RegisteredDraft, *, by: str, reason: str) -> RegisteredDraft | None:
    """Take a champion out of service: the version it replaced, if any, serves again, and is returned.

    Where somebody has promoted another version since, only the decision is noted.
    """
    client, present = connect(uri), champion(uri, draft.name)
    back = present
    if present and present.version == draft.version:
        before = present.tags.get(REPLACES)
        if before:
            client.set_registered_model_alias(draft.name, CHAMPION, before)
        else:
            client.delete_registered_model_alias(draft.name, CHAMPION)
        back = _draft(client, draft.name, int(before)) if before else None
    write_decision(uri, draft.name, draft.version, "rolled back", champion_before=draft.version, by=by, reason=reason)
    return back


def note_smoke_test(uri: str, draft: RegisteredDraft, passed: bool, reason: str) -> RegisteredDraft:
    """Keep what the smoke test said of a version."""
    client = connect(uri)
    said = f"{'passed' if passed else 'failed'}: {reason}"
    client.set_model_version_tag(draft.name, str(draft.version), SMOKE_TEST, said[:LONGEST])
    return _draft(client, draft.name, draft.version)


def refuse(uri: str, draft: RegisteredDraft, *, by: str, reason: str) -> RegisteredDraft:
    """Note who refused a version and why; it stays what it is."""
    client, present = connect(uri), champion(uri, draft.name)
    before = present.version if present else None
    write_decision(uri, draft.name, draft.version, "refused", champion_before=before, by=by, reason=reason)
    client.set_model_version_tag(draft.name, str(draft.version), REFUSED, reason[:LONGEST])
    return _draft(client, draft.name, draft.version)


def rollback(uri: str, name: str, *, by: str, reason: str) -> RegisteredDraft:
    """Make the version that the champion replaced champion again, and note who decided it and why.

    Raises Refusal where there is none.
    """
    client = connect(uri)
    present = champion(uri, name)
    if present is None:
        raise Refusal(f"{name} has no champion to roll back: `draftsmith drafts list` shows what there is")
    before = present.tags.get(REPLACES)
    if not before:
        raise Refusal(f"version {present.version} of {name} replaced no other: promote one with `drafts promote`")
    client.set_registered_model_alias(name, CHAMPION, before)
    client.delete_model_version_tag(name, str(present.version), REPLACES)
    write_decision(uri, name, present.version, "rolled back", champion_before=present.version, by=by, reason=reason)
    return _draft(client, name, int(before))


def champion(uri: str, name: str) -> RegisteredDraft | None:
    """The version in service, if any."""
    client = connect(uri)
    if not _exists(client, name):
        return None
    aliases = client.get_registered_model(name).aliases
    return _draft(client, name, int(aliases[CHAMPION])) if CHAMPION in aliases else None


def find_version(uri: str, name: str, version: int) -> RegisteredDraft:
    """One version. Raises Refusal where there is none."""
    return _draft(connect(uri), name, version)


def version_of_run(uri: str, name: str, run: str) -> RegisteredDraft | None:
    """The version that this run registered, if it came that far."""
    return next((draft for draft in list_drafts(uri, name) if draft.tags.get(RUN) == run), None)


def list_drafts(uri: str, name: str | None = None) -> list[RegisteredDraft]:
    """All versions of all drafts (or of one), newest first."""
    client = connect(uri)
    models = client.search_registered_models(filter_string=f"name = '{name}'" if name else None)
    found: list[RegisteredDraft] = []
    for model in models:
        aliases = {alias: int(version) for alias, version in model.aliases.items()}
        versions = client.search_model_versions(f"name = '{model.name}'", order_by=["version_number DESC"])
        found += [_record(version, aliases) for version in versions]
    return found


def download(uri: str, draft: RegisteredDraft, folder: Path) -> Path:
    """Copy a version's export into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    source = f"models:/{draft.model_id}"
    connect(uri)
    artifacts.download_artifacts(artifact_uri=source, dst_path=str(folder), tracking_uri=uri, registry_uri=uri)
    return folder


def describe(uri: str, draft: RegisteredDraft) -> str:
    """The version's description, Markdown."""
    return str(connect(uri).get_model_version(draft.name, str(draft.version)).description or "")


def read_request_counts(uri: str, draft: RegisteredDraft) -> RequestCounts:
    """What every conversation of a version's benchmark came to. Raises Refusal for a version without it."""
    return RequestCounts.model_validate_json(read_artifact(uri, draft, REQUEST_COUNTS))


def read_evidence(uri: str, draft: RegisteredDraft) -> GateEvidence:
    """What the gate decided on. Raises Refusal for a version without it."""
    return GateEvidence.model_validate_json(read_artifact(uri, draft, EVIDENCE))


def read_artifact(uri: str, draft: RegisteredDraft, path: str) -> str:
    """A text that the version's run has logged. Raises Refusal for a version without it."""
    client = connect(uri)
    run_id = str(client.get_model_version(draft.name, str(draft.version)).run_id)
    folder = path.rpartition("/")[0] or None
    if path not in {artifact.path for artifact in client.list_artifacts(run_id, folder)}:
        raise Refusal(
            f"the run of version {draft.version} of {draft.name} has no {path}: it was made by another version of "
            "Draftsmith, so retrain it"
        )
    with TemporaryDirectory(prefix="draftsmith-") as copy:
        return Path(client.download_artifacts(run_id, path, copy)).read_text()


def _exists(client: MlflowClient, name: str) -> bool:
    return bool(client.search_registered_models(filter_string=f"name = '{name}'"))


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
        acceptance_length=float(tags[ACCEPTANCE]) if ACCEPTANCE in tags else None,
        tags=tags,
    )
