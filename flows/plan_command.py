"""`draftsmith retrain RECIPE --plan`: memory, speed, time and cost of a run, before it starts."""

from typing import TYPE_CHECKING

from infra.refusal import Refusal

if TYPE_CHECKING:
    from infra.planner.plan import Plan
    from infra.planner.words import Section
    from models.config.recipe import RunConfig


def checked_plan(config: "RunConfig") -> "Plan":
    """The recipe's plan; raises Refusal for what is impossible, with the nearest recipe that is possible."""
    from infra.planner.refusals import refusals
    from tasks.plan import check_recipe, plan_recipe

    plan = plan_recipe(config)
    check_recipe(config, plan.job.target)
    if found := refusals(plan):
        raise Refusal("this recipe cannot run:\n" + "\n".join(f"  {refusal}" for refusal in found))
    return plan


def print_plan(plan: "Plan") -> None:
    """Verdicts, tables and assumptions, on the terminal."""
    from rich.console import Console
    from rich.text import Text

    from infra.planner.words import headline, sections, verdicts

    console = Console(highlight=False)
    console.print(Text(headline(plan), style="bold"))
    for verdict in verdicts(plan):
        name, _, rest = verdict.partition(": ")
        console.print(Text.assemble((f"  {name:<8}", "bold cyan"), rest))
    for section in sections(plan):
        console.print()
        console.print(_table(section))
    console.print()
    console.print(Text("Assumed", style="bold"))
    for assumption in plan.job.assumptions:
        console.print(Text(f"  - {assumption}", style="dim"))


def _table(section: "Section"):
    from rich import box
    from rich.table import Table

    table = Table(title=section.title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for index, column in enumerate(section.columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=not index)
    for index, row in enumerate(section.rows):
        table.add_row(*row, style="bold green" if index == section.marked else None)
    return table
