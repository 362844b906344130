"""The benchmark-champion flow, scheduled nightly: does the champion still accept what it did?"""

from prefect import flow

from infra.drift.store import prompts_are_gone
from tasks.benchmark import measure_again, note_figures, tell_of_change
from tasks.events import tell_failure
from tasks.pools import lease
from tasks.run import open_run
from tasks.version_run import find_champion, prepare_version, recipe_of


@flow(name="benchmark-champion", on_failure=[tell_failure])
def benchmark_champion(draft: str, tracking_uri: str | None = None, run: str | None = None) -> str:
    """Measure the champion on its own prompts again: engine, driver and hardware may have changed under it.

    Args:
        draft: registered model, for instance draft-quickstart.
        tracking_uri: MLflow; default: $MLFLOW_TRACKING_URI, then runs/mlflow.db.
        run: name of a run to resume; if empty, a new run.

    Returns what was found, in words. Raises Refusal where the figure has moved by more than the recipe's gap.
    """
    champion = find_champion(tracking_uri, draft)
    config = recipe_of(tracking_uri, champion, "nightly")
    if prompts_are_gone(config.data.source):
        return (
            f"version {champion.version} of {draft} is not measured again: it learned from users' prompts, which were "
            "removed after clean-up's prompt_days"
        )
    with open_run(config, run) as opened:
        prepare_version(opened, champion)
        with lease(opened, "inference") as (inference,):
            result = measure_again(opened, inference)
        note_figures(opened, champion, result)
    return tell_of_change(champion, result, opened.config.promotion.max_gap)
