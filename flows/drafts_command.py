"""`draftsmith drafts`: the registered drafts."""

import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from flows.init_command import write_output
from infra.network.health import public
from infra.network.ports import HOST
from infra.quantities import plural
from infra.refusal import Refusal
from infra.settings import check_home_folder, prefect_api_url, tracking_uri
from infra.user import user_name

if TYPE_CHECKING:
    from infra.tracking.promotion import DraftInService

drafts = typer.Typer(help="List, promote and roll back registered drafts.", no_args_is_help=True)


@drafts.callback()
def check_registry() -> None:
    """List, promote and roll back registered drafts."""
    check_home_folder()
    from infra.tracking.client import check_answers, give_up_soon

    give_up_soon()
    check_answers(tracking_uri())


YES_NO = {"true": "yes", "false": "no"}
Reason = Annotated[str, typer.Option("--reason", help="Shown by `drafts history`.")]
Name = Annotated[str | None, typer.Option("--name", help="Registered model. Default: the only one.")]


@drafts.command("list")
def list_versions(name: Name = None) -> None:
    """Show every version, its acceptance length and its aliases."""
    from rich.console import Console
    from rich.table import Table

    from infra.tracking.registry import ACCEPTANCE, list_drafts

    table = Table()
    for column in ("draft", "version", "alias"):
        table.add_column(column, no_wrap=True)
    for column in ("acceptance length", "beats prompt lookup"):
        table.add_column(column, max_width=10)
    table.add_column("run", overflow="fold")
    for registered in sorted({draft.name for draft in list_drafts(tracking_uri(), name)}):
        _reconcile(registered)
    for draft in list_drafts(tracking_uri(), name):
        tags = draft.tags
        # A text that is no number (any more) is shown as it is.
        length = tags.get(ACCEPTANCE, "") if draft.acceptance_length is None else f"{draft.acceptance_length:.2f}"
        shown = (length, YES_NO.get(tags.get("beats_prompt_lookup", ""), ""), tags.get("run", ""))
        table.add_row(draft.name, str(draft.version), ", ".join(draft.aliases), *shown)
    if table.row_count:
        Console(markup=False).print(table)
    else:
        print(f"no drafts in {public(tracking_uri())} yet: `draftsmith retrain recipes/quickstart.yaml`")


@drafts.command()
def overview(
    page: Annotated[Path | None, typer.Option("--page", metavar="FILE", help="Write an HTML page instead.")] = None,
) -> None:
    """Show every draft: what serves, what it accepts, what runs next, and what needs a person."""
    from tasks.overview import page_of, read_drafts

    rows = read_drafts()
    if page is not None:
        write_output("--page", page, page_of(rows))
        print(f"{plural(len(rows), 'draft')} in {page}")
        return
    if not rows:
        print(f"no drafts in {public(tracking_uri())} yet: `draftsmith retrain recipes/quickstart.yaml`")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_lines=True)
    table.add_column("draft", no_wrap=True)
    for column in ("serves", "acceptance length", "drift", "retraining"):
        table.add_column(column, overflow="fold")
    for row in rows:
        benchmarked = f"{row.benchmarked:.2f} benchmarked\n" if row.benchmarked else ""
        benchmarked += f"{row.goodput}\n" if row.goodput else ""
        runs = f"last: {row.last_run}\nnext: {row.next_run}\nused: {row.used}"
        table.add_row(row.draft, row.serves, f"{benchmarked}{row.recently}\n{row.sparkline}".strip(), row.drift, runs)
    Console(markup=False).print(table)
    for row in rows:
        for what in row.wanted:
            print(f"{row.draft}: {what}")


@drafts.command()
def metrics(
    port: Annotated[int, typer.Option("--port", metavar="PORT", help="Where to listen.", min=0, max=65535)] = 9109,
    host: Annotated[str, typer.Option("--host", metavar="HOST", help="Address to listen at.")] = HOST,
) -> None:
    """Serve the overview for Prometheus, until Ctrl-C."""
    from infra.processes.exit import told_to_stop
    from tasks.metrics import serving_metrics

    with told_to_stop() as stop, serving_metrics(host, port) as address:
        print(f"{address}/metrics for Prometheus, until Ctrl-C", flush=True)
        stop.wait()


@drafts.command()
def promote(version: Annotated[int, typer.Argument(min=1)], reason: Reason = "", name: Name = None) -> None:
    """Promote a version regardless of the gate, without a smoke test."""
    from infra.tracking import registry

    draft = draft_in_service(_registered(name)).promote(version, by=user_name(), reason=reason)
    if registry.CHAMPION not in draft.aliases:
        print(f"{draft.name} version {version} is not champion: `draftsmith drafts history` says why", file=sys.stderr)
        raise typer.Exit(1)
    replaced = draft.tags.get(registry.REPLACES)
    print(f"{draft.name} version {draft.version} is champion" + (f", replacing version {replaced}" if replaced else ""))


@drafts.command()
def rollback(reason: Reason = "", name: Name = None) -> None:
    """Withdraw the champion; the version it replaced becomes champion again."""
    from infra.tracking.registry import champion

    draft = _registered(name)
    withdrawn = draft_in_service(draft).rollback(by=user_name(), reason=reason)
    now = champion(tracking_uri(), draft)
    if now and now.version == withdrawn:
        print(f"{draft} version {withdrawn} is still champion: `draftsmith drafts history` says why", file=sys.stderr)
        raise typer.Exit(1)
    print(
        f"{draft} version {withdrawn} is withdrawn: "
        + (f"version {now.version} is champion again" if now else "no version serves")
    )


@drafts.command("history")
def show_history(name: Name = None) -> None:
    """Show all decisions: version, outcome, who, when and why."""
    from rich.console import Console
    from rich.table import Table

    from infra.tracking.registry import history

    table = Table()
    for column in ("when (UTC)", "version", "decision", "champion before", "by", "why"):
        table.add_column(column, overflow="fold")
    draft = _registered(name)
    _reconcile(draft)
    for decision in history(tracking_uri(), draft):
        when = time.strftime("%Y-%m-%d %H:%M", time.gmtime(decision.at))
        before = "" if decision.champion_before is None else str(decision.champion_before)
        table.add_row(when, str(decision.version), decision.outcome, before, decision.by, decision.reason)
    if table.row_count:
        Console(markup=False).print(table)
    else:
        print(f"nothing was decided in {public(tracking_uri())} yet")


@drafts.command()
def replay(version: Annotated[int, typer.Argument(min=1)], name: Name = None) -> None:
    """Repeat a gate's decision from its evidence; exit status 1 if it differs."""
    from infra.records.acceptance import GateDecision
    from infra.tracking import registry

    draft = registry.find_version(tracking_uri(), _registered(name), version)
    with TemporaryDirectory(prefix="draftsmith-") as folder:
        evidence = Path(folder) / "gate.json"
        evidence.write_text(registry.read_artifact(tracking_uri(), draft, registry.EVIDENCE))
        command = [sys.executable, "-m", "models.benchmark.gate", str(evidence)]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    decision, then = GateDecision.model_validate_json(printed), draft.tags.get(registry.GATE, "")
    now = "passed" if decision.passed else "not passed"
    print(f"version {version} of {draft.name}: gate {now}, {decision.reason}")
    print("the recorded decision is the same" if now == then else f"the recorded decision differs: {then or 'none'}")
    raise typer.Exit(int(now != then))


def draft_in_service(draft: str, uri: str | None = None) -> "DraftInService":
    """A registered model, of $MLFLOW_TRACKING_URI or of `uri`; its changes emit events if there is a Prefect server."""
    from infra.tracking.promotion import DraftInService

    if prefect_api_url() is None:
        return DraftInService(uri or tracking_uri(), draft)
    from tasks.promotion import announce

    return DraftInService(uri or tracking_uri(), draft, announce=announce)


def _reconcile(name: str) -> None:
    """Complete interrupted changes and those made in MLflow's page; name a smoke test that is still due, and what keeps
    a change from being completed."""
    from mlflow.exceptions import MlflowException

    try:
        waiting = draft_in_service(name).reconcile()
    except Refusal as refusal:
        print(refusal, file=sys.stderr)
        return
    except MlflowException as error:
        if error.error_code != "PERMISSION_DENIED":
            raise
        print(
            f"{name}: a change is incomplete; you may only read the registry, so somebody who may write to it must "
            "complete it",
            file=sys.stderr,
        )
        return
    if waiting:
        print(
            f"{name} version {waiting.version} has not passed its smoke test yet: the deployment `reconcile` runs it, "
            f"`draftsmith drafts promote {waiting.version} --name {name}` does without",
            file=sys.stderr,
        )


def _registered(name: str | None) -> str:
    """The only registered draft, if no name is given."""
    from infra.tracking.registry import list_drafts

    names = sorted({draft.name for draft in list_drafts(tracking_uri(), name)})
    if not names:
        raise Refusal(
            f"no draft {name + ' ' if name else ''}is registered: `draftsmith drafts list` shows what there is"
        )
    if len(names) > 1:
        raise Refusal(f"there are several drafts, name one with --name: {', '.join(names)}")
    return names[0]
