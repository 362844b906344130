"""`draftsmith data check`: what a source holds, before a recipe uses it."""

import subprocess
import sys
from typing import Annotated

import typer

from infra.processes.exit import REFUSED

data = typer.Typer(help="Look at training text.", no_args_is_help=True)
PREVIEW = [sys.executable, "-m", "models.data.preview"]


@data.callback()
def _group() -> None:
    """Look at training text."""


@data.command()
def check(
    source: Annotated[str, typer.Argument(help="A file, folder, address or dataset, as data.source of a recipe.")],
    target: Annotated[
        str | None, typer.Option("--target", metavar="TARGET", help="Show samples as this target's template renders.")
    ] = None,
    chat_template: Annotated[
        str, typer.Option("--chat-template", metavar="FILE", help="A template file, or `none` for plain text.")
    ] = "tokenizer",
    samples: Annotated[int, typer.Option("--samples", metavar="N", min=0, help="Number of samples to show.")] = 2,
) -> None:
    """List every broken record, count the rest, and show samples with what a draft would learn in colour.

    Exit status: 0 where all records can be used, 1 where some are broken, 2 where the source cannot be used.
    """
    shown = [] if target is None else ["--target", target, "--samples", str(samples)]
    command = [*PREVIEW, source, "--chat-template", chat_template, *shown]
    raise typer.Exit(subprocess.run(command, check=False).returncode)


def print_findings(source: str, chat_template: str, max_broken_share: float) -> None:
    """Print what a recipe's source holds; end with status 2 where a run would refuse it."""
    limits = ["--chat-template", chat_template, "--max-broken-share", str(max_broken_share)]
    if subprocess.run([*PREVIEW, source, *limits], check=False).returncode == REFUSED:
        raise typer.Exit(REFUSED)


def kind_of(source: str) -> str:
    """What the first usable record of a source is; empty where there is none. Ends with status 2 for a bad source."""
    done = subprocess.run([*PREVIEW, source, "--kind"], check=False, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise typer.Exit(done.returncode)
    return done.stdout.strip()
