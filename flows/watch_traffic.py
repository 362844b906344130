"""The watch-traffic flow, scheduled every few minutes: reads served acceptance and tests it for drift. Needs no GPU."""

from prefect import flow

from infra.drift.config import WatchConfig
from tasks.drift import (
    announce_degradation,
    announce_drift,
    judge_traffic,
    observe_traffic,
    report_unknown,
    sample_requests,
    show_traffic,
)


@flow(name="watch-traffic")
def watch_traffic(config: WatchConfig) -> str:
    """Count served traffic for the version that each server runs, and test each version's for a fall.

    An alarm of the champion emits the event that starts a retraining, or a rollback where the version itself is worse
    than the one that it replaced. A server that runs an unknown draft is reported.

    Returns a summary of each version.
    """
    look = report_unknown(config, observe_traffic(config))
    look, findings, refusals = judge_traffic(config, look)
    for finding in findings:
        if finding.event == "degraded":
            look = announce_degradation(config, look, finding)
        elif finding.event == "drifted":
            prompts = sample_requests(config, config.requests) if config.requests else None
            look = announce_drift(config, look, finding, prompts)
    return show_traffic(config, look, findings, refusals)
