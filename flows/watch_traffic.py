"""The watch-traffic flow: one look at what the serving engine accepts. Scheduled every some minutes; needs no GPU."""

from prefect import flow

from infra.drift.config import WatchConfig
from tasks.drift import (
    announce_degradation,
    announce_drift,
    judge_traffic,
    observe_traffic,
    sample_requests,
    show_traffic,
)


@flow(name="watch-traffic")
def watch_traffic(config: WatchConfig) -> str:
    """Append a window of served traffic, test it for a fall, and on an alarm emit the event that starts retraining.

    Where the fall came with a new version, the event asks for its rollback instead.

    Returns what was found, in words.
    """
    draft, traffic = observe_traffic(config)
    finding = judge_traffic(config, draft, traffic)
    if finding.due and finding.is_the_versions_fault(config.probation_windows):
        finding = announce_degradation(config, finding)
    elif finding.due:
        prompts = sample_requests(config, config.requests) if config.requests else None
        finding = announce_drift(config, finding, prompts)
    show_traffic(finding)
    return finding.summary
