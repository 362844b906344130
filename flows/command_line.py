"""The command `draftsmith`. Commands import heavy libraries themselves, so that `--help` is fast."""

import sys
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.bench_command import PASS_ON, bench
from flows.data_command import data
from flows.deploy_command import deploy, undeploy
from flows.doctor_command import doctor
from flows.drafts_command import drafts
from flows.follow_command import serve_follow
from flows.init_command import init
from flows.stack_command import down, ui, up
from flows.status_command import find_run, status
from infra.files.folders import check_working_folder
from infra.processes.exit import run_main
from infra.redaction import redacted
from infra.refusal import Refusal
from infra.settings import reach_loopback_directly

if TYPE_CHECKING:
    from models.config.recipe import RunConfig

app = typer.Typer(
    help="Train, prove, promote and retrain draft models for speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(data, name="data")
app.add_typer(drafts, name="drafts")
app.command()(init)


@app.command()
def retrain(
    recipe: Annotated[Path | None, typer.Argument(help="A YAML file of recipes/.")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[section.field=value]...")] = None,
    plan: Annotated[
        bool, typer.Option("--plan", metavar="", help="Print memory, speed, time and cost, and start nothing.")
    ] = False,
    resume: Annotated[str | None, typer.Option("--resume", metavar="RUN", help="Resume this run.")] = None,
) -> None:
    """Train, prove, register and (if it earned that) promote a draft."""
    from models.config.recipe import load_recipe, read_config, with_overrides

    if resume is not None:
        if recipe is not None and "=" in str(recipe):
            recipe, overrides = None, [str(recipe), *(overrides or [])]
        folder = find_run(resume)
        config = with_overrides(read_config(folder / "config.json"), overrides or [])
        if recipe is not None and load_recipe(recipe).name != config.name:
            raise Refusal(f"{folder} is a run of the recipe {config.name}, not of {recipe}: leave the recipe out")
    elif recipe is None:
        raise Refusal("which recipe? Name a file, for instance recipes/quickstart.yaml")
    else:
        folder, config = None, load_recipe(recipe, overrides)
    if plan:
        from flows.plan_command import print_plan

        print_plan(config)
        return
    if folder is not None:
        _forget_crashes(config, folder)
    from flows import from_python

    print(from_python.retrain(config, str(folder) if folder else None))


@app.command()
def regenerate(
    recipe: Annotated[Path, typer.Argument(help="A YAML file of recipes/, with data.regeneration.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[section.field=value]...")] = None,
) -> None:
    """Let the target answer the recipe's prompts. `retrain` does so too, unless it is done."""
    from models.config.recipe import load_recipe

    config = load_recipe(recipe, overrides)
    if config.data.regeneration is None:
        raise Refusal(f"{recipe} does not regenerate: add data.regeneration={{}} for its defaults")
    from flows import from_python

    print(from_python.regenerate(config))


def _forget_crashes(config: "RunConfig", folder: Path) -> None:
    """Let a run start again that was stopped by repeated crashes: the person who resumes it has removed the cause.

    Changes nothing, and raises Refusal, while another process runs it.
    """
    from infra.files.run_folder import RunFolder
    from infra.ledger.ledger import Ledger
    from infra.run.ownership import hold_run

    run = RunFolder(folder)
    with hold_run(run, lambda line: print(line, file=sys.stderr)):
        if run.ledger_file.is_file() or config.ledger.url:
            with Ledger.open(config.ledger.url or run.ledger_url, run.name) as ledger:
                ledger.forget_crashes()


app.command(context_settings=PASS_ON)(bench)
for command in (deploy, undeploy, serve_follow, status, doctor, ui, up, down):
    app.command()(command)


def main() -> None:
    """Run the command line: a Refusal becomes one message and exit status 2."""
    from infra.processes.process import ProcessFailedError

    reach_loopback_directly()
    for stream in (sys.stdout, sys.stderr):  # a terminal that lacks a character shows a question mark
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")

    def run() -> None:
        try:
            app()
        except (PermissionError, FileNotFoundError):
            check_working_folder()  # it may be what is closed or gone: relative paths start there
            raise

    try:
        run_main(run)
    except ProcessFailedError as error:
        print(f"error: {redacted(str(error))}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None
