"""The retrain flow: from prompts to a promoted draft. Everything heavy runs in child processes."""

from contextlib import closing

from prefect import flow

from infra.records.sharing import alternates
from models.config.recipe import RunConfig
from tasks.benchmark import benchmark_draft, benchmark_served
from tasks.events import tell_failure
from tasks.pools import lease, lease_both, only_training_of_its_draft
from tasks.prepare import (
    check_data,
    collect_requests,
    fetch_start,
    plan_run,
    preflight,
    prepare_samples,
    prepare_target,
    regenerate_text,
)
from tasks.promotion import ended, promote_or_refuse
from tasks.registry import register_draft, track_samples, track_training, tracked
from tasks.report.write import write_report
from tasks.rounds import capture_round, train_round
from tasks.run import open_run
from tasks.training import export_draft, start_generators, storing, train


@flow(name="retrain", on_failure=[tell_failure])
def retrain(config: RunConfig, run: str | None = None) -> str:
    """Train a draft on streamed hidden states, prove it, and promote it if it earned that.

    Args:
        config: the recipe.
        run: name or folder of a run to resume; if None, a new run.

    Returns the run folder's path.
    """
    with open_run(config, run) as opened, only_training_of_its_draft(opened), tracked(opened) as tracking:
        check_data(opened)
        target = prepare_target(opened)
        fetch_start(opened)
        preflight(opened)
        if config.data.regeneration:
            with lease(opened, "inference") as (inference,):
                regenerate_text(opened, inference)
        if config.generator.live:
            collect_requests(opened)
        samples = prepare_samples(opened, target)
        track_samples(opened, tracking, samples)
        plan_run(opened, target, samples)
        with lease_both(opened) as (inference, training), storing(opened, training) as store:
            if alternates(opened.folder):
                while (trained := train_round(opened, training, store)) is None:
                    capture_round(opened, inference, store)
            else:
                with closing(start_generators(opened, inference)) as generators:
                    trained = train(opened, training, generators, store)
        track_training(opened, tracking)
        export = export_draft(opened)
        with lease(opened, "inference") as (inference,):
            benchmark_served(opened, inference)
            result = benchmark_draft(opened, inference, target)
            draft = register_draft(opened, tracking, target, trained, export, result)
            draft = promote_or_refuse(opened, inference, draft, result.gate)
        write_report(opened, target, samples, trained, result, draft)
    return ended(str(opened.folder.path), draft, result.gate)
