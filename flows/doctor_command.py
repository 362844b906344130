"""`draftsmith doctor`: checks this machine."""

from typing import Annotated

import typer


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as a JSON list.")] = False,
) -> None:
    """Check this machine and say how to fix what is missing.

    Exit status: 0 when the quickstart can run here, 1 when a problem was found.
    """
    from infra.doctor.examination import examine
    from infra.doctor.finding import Finding

    findings: list[Finding] = examine()
    problems = sum(finding.verdict == "problem" for finding in findings)
    if as_json:
        import json

        print(json.dumps([finding.model_dump() for finding in findings], indent=1))
    else:
        _show(findings, problems)
    raise typer.Exit(1 if problems else 0)


def _show(findings: list, problems: int) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    styles = {"ok": "green", "note": "yellow", "problem": "bold red"}
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(max_width=21, overflow="fold")
    table.add_column(overflow="fold")  # a path is broken, not cut
    for finding in findings:
        said = Text(finding.found)
        if finding.remedy:
            said.append("\n-> " + finding.remedy, style="dim" if finding.verdict == "note" else "bold")
        table.add_row(Text(finding.verdict, style=styles[finding.verdict]), finding.name, said)
    console = Console()
    console.print(table)
    notes = sum(finding.verdict == "note" for finding in findings)
    verdict = f"{problems} problem{'s' * (problems != 1)} to fix first" if problems else "The quickstart can run here"
    console.print(f"\n{verdict}; {notes} note{'s' * (notes != 1)}.", highlight=False)
