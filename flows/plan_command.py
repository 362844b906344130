"""`draftsmith retrain RECIPE --plan`: memory, speed, time and cost of a run, before it starts."""

import yaml
from rich.console import Console
from rich.markdown import Markdown

from flows.data_command import print_findings
from infra.planner.page import plan_page
from infra.redaction import redacted
from infra.settings import expanded
from models.config.recipe import RunConfig
from tasks.plan import checked_plan


def print_plan(config: RunConfig) -> None:
    """Print the full recipe, the Slurm job if it is one, and the plan; nothing but the refusal if it cannot run."""
    page = plan_page(checked_plan(config))
    print(yaml.safe_dump(redacted(config.model_dump(mode="json")), sort_keys=False, width=110), end="")
    if config.pools.kind == "slurm":
        from infra.pools.run_pools import pool_specs
        from infra.pools.slurm_engine import dry_run

        print("---")
        print(dry_run(config.name, pool_specs(config.pools, config.generator.count), config.pools), end="")
    print("---", flush=True)
    Console(highlight=False).print(Markdown(page))
    if expanded("data.source", config.data.source).exists():
        print_findings(config.data.source, config.data.chat_template, config.data.max_broken_share)
