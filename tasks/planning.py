"""Plans a run whose target and samples are ready, before any GPU is leased."""

from collections.abc import Iterator

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact

from infra.files.atomic import write_atomically
from infra.markdown import escaped, markdown_table
from infra.planner.plan import Plan
from infra.planner.refusals import refusals
from infra.planner.words import headline, sections, verdicts
from infra.records.data_path import SamplesRecord, TargetRecord
from infra.refusal import Refusal
from tasks.plan import plan_recipe
from tasks.run import OpenRun
from tasks.side_effects import artifact_key, side_effect


@side_effect("plan run", retries=0)
def plan_run(run: OpenRun, target: TargetRecord, samples: SamplesRecord) -> None:
    """Write `plan.json` and show it. An estimate stops no run: `--plan` refuses, here it is a warning."""
    logger = get_run_logger()
    try:
        plan = plan_recipe(run.config, target, samples)
    except Refusal as error:
        logger.warning("no plan: %s", error)
        return
    write_atomically(run.folder.plan, plan)
    for verdict in verdicts(plan):
        logger.info("plan: %s", verdict)
    for refusal in refusals(plan):
        logger.warning("plan: %s", refusal)
    create_markdown_artifact(
        plan_page(plan), key=artifact_key("plan", run.config.name), description=escaped(headline(plan))
    )


def plan_page(plan: Plan) -> str:
    """The plan as Markdown."""
    return "\n\n".join(_paragraphs(plan)) + "\n"


def _paragraphs(plan: Plan) -> Iterator[str]:
    yield f"# {escaped(headline(plan))}"
    yield "\n".join(f"- {escaped(verdict)}" for verdict in (*verdicts(plan), *map(str, refusals(plan))))
    for section in sections(plan):
        yield f"### {escaped(section.title)}"
        yield markdown_table([dict(zip(section.columns, row, strict=True)) for row in section.rows])
    yield "### Assumed"
    yield "\n".join(f"- {escaped(assumption)}" for assumption in plan.job.assumptions)
