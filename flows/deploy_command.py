"""`draftsmith deploy` and `undeploy`: the deployments of one draft."""

from pathlib import Path
from typing import Annotated

import typer

from flows.prefect_server import check_prefect
from infra.network.health import public
from infra.refusal import Refusal
from infra.settings import prefect_api_url, runs_folder


def deploy(
    recipe: Annotated[Path, typer.Argument(help="A YAML file of recipes/.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[section.field=value]...")] = None,
    *,
    cron: Annotated[
        str | None, typer.Option("--cron", metavar="CRON", help="When to retrain, in UTC, for instance '0 3 * * 0'.")
    ] = None,
    watch: Annotated[
        list[str] | None, typer.Option("--watch", metavar="URL", help="An SGLang server to watch; may be repeated.")
    ] = None,
    requests: Annotated[
        str | None,
        typer.Option("--requests", metavar="FOLDER", help="Logged requests of these servers, local or s3://."),
    ] = None,
    notify: Annotated[
        list[str] | None,
        typer.Option("--notify", metavar="TYPE/NAME", help="A notification block to tell, as slack-webhook/ops."),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--folder", metavar="FOLDER", help="Where runs start, on the worker; default: as before."),
    ] = None,
    pause: Annotated[
        bool | None,
        typer.Option("--pause/--no-pause", help="Deploy without starting any schedule, or start them again."),
    ] = None,
) -> None:
    """Create or update a draft's deployments in Prefect: retraining, promotion, nightly benchmark, traffic watch.

    Options that are left out stay as they were, and so does what was changed in Prefect's page, but for what a given
    option sets.
    """
    from models.config.recipe import load_recipe
    from tasks.draft_deployments import DeployOptions, deploy_draft, folder_in_force

    config, logs, here = load_recipe(recipe, overrides), _folder(), str(Path.cwd())
    before = folder_in_force(config.draft_name)
    wanted = str(folder.absolute()) if folder else before or here
    options = {"cron": cron, "watch": watch, "requests": requests, "notify": notify}
    given = {name: value for name, value in options.items() if value}
    given |= {} if pause is None else {"paused": pause}
    names, stays = deploy_draft(logs, config, DeployOptions.model_validate({**given, "folder": wanted}))
    print(f"{config.draft_name} in {public(prefect_api_url() or '')}: {', '.join(names)}")
    if folder is None and wanted != here:
        print(f"Runs start in {wanted}, with the code there; where the project has moved, give `--folder {here}`")
    else:
        print(f"Runs start in {wanted}" + (f", before in {before}" if before not in (None, wanted) else ""))
    if stays:
        print("Stays as it was changed in Prefect:", *stays, sep="\n  ")
    print(f"To train it now: prefect deployment run retrain/{config.name}")


def undeploy(
    name: Annotated[str, typer.Argument(metavar="DRAFT", help="The registered model, for instance draft-quickstart.")],
) -> None:
    """Delete a draft's deployments, schedules and notifications. Its versions, runs and served drafts stay."""
    from tasks.draft_deployments import undeploy_draft

    found = undeploy_draft(_folder(), name)
    print(f"{name}: {found} deployments deleted" if found else f"{name} is not deployed")


def _folder() -> Path:
    if prefect_api_url() is None:
        raise Refusal(
            "PREFECT_API_URL names no Prefect server: `draftsmith up` starts one; then `. runs/.stack/environment`"
        )
    check_prefect()
    return runs_folder() / ".deployments"
