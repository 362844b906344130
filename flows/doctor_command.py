"""`draftsmith doctor`: checks this machine."""

from typing import Annotated

import typer

STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


def doctor(
    as_json: Annotated[bool, typer.Option("--json", metavar="", help="Print the findings as a JSON list.")] = False,
) -> None:
    """Check this machine and say how to fix what is missing.

    Exit status: 0 when the quickstart can run here, 1 when a problem was found.
    """
    from infra.doctor.checks import examine
    from infra.quantities import plural

    findings = examine()
    problems, notes = (sum(finding.verdict == verdict for finding in findings) for verdict in ("problem", "note"))
    if as_json:
        import json

        print(json.dumps([finding.model_dump() for finding in findings], indent=1))
    else:
        _show(findings)
        verdict = f"{plural(problems, 'problem')} to fix first" if problems else "The quickstart can run here"
        print(f"\n{verdict}; {plural(notes, 'note')}.")
    raise typer.Exit(1 if problems else 0)


def _show(findings: list) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(max_width=21, overflow="fold")
    table.add_column(overflow="fold")  # a path is broken, not cut
    for finding in findings:
        text = Text(finding.found)
        if finding.remedy:
            text.append("\n-> " + finding.remedy, style="dim" if finding.verdict == "note" else "bold")
        table.add_row(Text(finding.verdict, style=STYLES[finding.verdict]), finding.name, text)
    Console().print(table)
