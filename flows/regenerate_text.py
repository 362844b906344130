"""The regenerate flow: the target's own answers to a recipe's prompts, without training."""

from prefect import flow

from models.config.recipe import RunConfig
from tasks.events import tell_failure
from tasks.pools import lease
from tasks.prepare import check_data, preflight, prepare_target, regenerate_text
from tasks.run import open_run


@flow(name="regenerate", on_failure=[tell_failure])
def regenerate(config: RunConfig, run: str | None = None) -> str:
    """Regenerate the text of a recipe; a later retraining with the same settings finds it done.

    Args:
        config: the recipe; its `data.regeneration` says how.
        run: name or folder of a run to resume; if None, a new run.

    Returns the path of the text, one document a line.
    """
    with open_run(config, run) as opened:
        check_data(opened)
        prepare_target(opened)
        preflight(opened)
        with lease(opened, "inference") as (inference,):
            return regenerate_text(opened, inference).path
