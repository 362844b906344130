"""The watch-traffic flow, scheduled every few minutes: reads served acceptance and tests it for drift. Needs no GPU."""

from contextlib import suppress

from prefect import flow

from infra.drift.config import WatchConfig
from infra.processes.process import ProcessFailedError
from infra.refusal import Refusal
from tasks.drift import (
    TargetChange,
    announce,
    announce_change,
    judge_traffic,
    observe_traffic,
    report_unknown,
    sample_requests,
    show_traffic,
)
from tasks.events import tell_failure_once_a_day


@flow(name="watch-traffic", on_failure=[tell_failure_once_a_day])
def watch_traffic(config: WatchConfig) -> str:
    """Count served traffic for the version that each server runs, and test each version's for a fall.

    An alarm of the champion emits the event that starts a retraining, or a rollback where the version itself is worse
    than the one that it replaced. So does a change of the target under it. A server that runs an unknown draft is
    reported.

    Returns a summary of each version.
    """
    look = judge_traffic(report_unknown(observe_traffic(config)))
    try:
        for alarm in look.alarms:
            if isinstance(alarm, TargetChange):
                fresh = alarm.retrains and config.requests
                look = announce_change(look, alarm, sample_requests(config, fresh) if fresh else None)
            else:
                fresh = alarm.event == "drifted" and config.requests
                look = announce(look, alarm, sample_requests(config, fresh) if fresh else None)
    except ProcessFailedError:
        # Request logs that cannot be read end the flow, but hide nothing of what it found.
        with suppress(Refusal):
            show_traffic(look)
        raise
    return show_traffic(look)
