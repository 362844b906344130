"""A run of a registered version: its recipe from the registry, its target, held-out prompts and export on this machine.

For flows that measure a version again, long after the run that made it.
"""

from pydantic import ValidationError

from infra.records.acceptance import RegisteredDraft
from infra.records.data_path import TargetRecord
from infra.refusal import Refusal
from infra.settings import tracking_uri
from infra.tracking import registry
from models.config.recipe import RunConfig
from tasks.pools import lease
from tasks.prepare import collect_requests, prepare_samples, prepare_target, regenerate_text
from tasks.run import OpenRun
from tasks.side_effects import side_effect


@side_effect("find champion")
def find_champion(uri: str | None, draft: str) -> RegisteredDraft:
    """The champion. Raises Refusal if there is none."""
    found = registry.champion(uri or tracking_uri(), draft)
    if found is None:
        raise Refusal(f"{draft} has no champion: promote one with `draftsmith drafts promote`")
    return found


@side_effect("read recipe")
def recipe_of(uri: str | None, draft: RegisteredDraft, purpose: str) -> RunConfig:
    """The recipe of a version, for a run that captures and trains nothing.

    It is run as MLflow says, whoever wrote it there: docs/operate.md, "Who may write to MLflow".
    """
    uri = uri or tracking_uri()
    try:
        config = RunConfig.model_validate_json(registry.read_artifact(uri, draft, registry.CONFIG))
    except ValidationError as error:
        raise Refusal(
            f"version {draft.version} of {draft.name} was made by another version of Draftsmith, whose recipes read "
            "differently: retrain it"
        ) from error
    # The environment's address may hold a password, which has no place in a recipe.
    elsewhere = None if uri == tracking_uri() else uri
    tracking = config.tracking.model_copy(update={"registered_model": draft.name, "uri": elsewhere})
    ledger = config.ledger.model_copy(update={"url": None})
    return config.model_copy(update={"name": f"{config.name}-{purpose}", "tracking": tracking, "ledger": ledger})


def prepare_target_of(run: OpenRun, draft: RegisteredDraft) -> TargetRecord:
    """The target of a version, which is all that its smoke test needs: the benchmark kept prompts.

    Raises Refusal where the target has changed since: figures of two targets are not compared.
    """
    target = prepare_target(run)
    made_for = draft.tags.get("target_revision", "")
    if target.revision != made_for:
        raise Refusal(
            f"version {draft.version} of {draft.name} was made for revision {made_for[:12]} of {target.name}, which is "
            f"now {target.revision[:12]}: retrain"
        )
    return target


def prepare_version(run: OpenRun, draft: RegisteredDraft) -> None:
    """Target, held-out prompts and export of a version, as its own run had them.

    Raises Refusal as `prepare_target_of` does.
    """
    target = prepare_target_of(run, draft)
    if run.config.data.regeneration:
        with lease(run, "inference") as (inference,):
            regenerate_text(run, inference)
    if run.config.generator.live:
        collect_requests(run)  # of today's traffic
    prepare_samples(run, target)
    fetch_export(run, draft)


@side_effect("fetch export")
def fetch_export(run: OpenRun, draft: RegisteredDraft) -> None:
    """Download the version's export, once."""
    if not run.folder.export.is_dir():
        registry.download(run.tracking_uri, draft, run.folder.export)
