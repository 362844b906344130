"""Watches served traffic: windows, the drift test, fresh prompts, the event that starts retraining. Flow process."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.events import emit_event

from infra.drift.config import RequestLogConfig, WatchConfig
from infra.drift.scrape import scrape
from infra.drift.sequential import DriftTest, Reference
from infra.drift.windows import Served, TrafficRecord, TrafficStore, Verdict, Window, judge, mean_length
from infra.files import write_atomically
from infra.health import public
from infra.processes import Owner, module, start
from infra.records import PromptsRecord
from infra.refusal import Refusal
from infra.results import RegisteredDraft
from infra.settings import runs_folder, tracking_uri
from infra.tracking.registry import REPLACES, RUN, champion, read_request_counts
from tasks.data_plane import worth_retrying
from tasks.drift_markdown import artifact_key, in_words, traffic_markdown

DRIFTED = "draftsmith.draft.drifted"
"""The event that starts retraining; its resource is the registered model."""
DEGRADED = "draftsmith.draft.degraded"
"""The event that starts a rollback: a version serves worse than the one that it replaced."""
RECENT = 10
"""Windows that a comparison takes."""
SAMPLING_TIMEOUT_S = 2 * 3600.0
RETRIES = {"retries": 2, "retry_delay_seconds": 10, "retry_condition_fn": worth_retrying, "cache_policy": NO_CACHE}


@dataclass(frozen=True)
class Finding:
    """What a look at the traffic came to."""

    draft: RegisteredDraft
    traffic: TrafficRecord
    test: DriftTest
    verdict: Verdict
    due: Window | None
    """The window whose alarm is to be announced."""

    @property
    def summary(self) -> str:
        return in_words(self.draft, self.traffic, self.test, self.verdict)

    def is_the_versions_fault(self, probation_windows: int) -> bool:
        """Whether the alarm came soon after a promotion, and the version accepts less than the one it replaced did.

        Less by half the fall that the test is made for: what differs by less is no ground to go back.
        """
        before, now = self.traffic.replaced, self.traffic.current
        if not before or not now or str(before[-1].served.version) != self.draft.tags.get(REPLACES):
            return False
        least = (1 - self.test.fall / 2) * mean_length(before[-RECENT:])
        return len(now) <= probation_windows and mean_length(now[-RECENT:]) < least


@task(name="observe traffic", **RETRIES)
def observe_traffic(config: WatchConfig) -> tuple[RegisteredDraft, TrafficRecord]:
    """Scrape the servers and append a window to the record, if enough was served since the last one."""
    uri, logger = config.tracking_uri or tracking_uri(), get_run_logger()
    draft = champion(uri, config.draft)
    if draft is None:
        raise Refusal(f"{config.draft} has no champion to watch: promote one with `draftsmith drafts promote`")
    found = scrape(config.servers, config.timeout_s)
    for url, why in found.silent.items():
        logger.warning("%s does not answer: %s", public(url), why)
    store = _store(config)
    before = store.read(config.draft)
    lookahead = found.lookahead()
    if lookahead is None and before.served and before.served.version == draft.version:
        lookahead = before.served.lookahead
    if lookahead is None:
        logger.info("the servers have not decoded since their start: nothing is known of their traffic yet")
        return draft, before
    served = Served(version=draft.version, lookahead=lookahead, traffic=config.traffic)
    if before.served not in (None, served):
        logger.info("served is now %s, before it was %s: the test begins anew", served, before.served)
    after = before.observe(found, served, time.time(), config.window_steps)
    store.write(after)
    if len(after.windows) == len(before.windows):
        logger.info("%d of %d verification steps for the next window", after.open.steps, config.window_steps)
    return draft, after


@task(name="test for drift", **RETRIES)
def judge_traffic(config: WatchConfig, draft: RegisteredDraft, traffic: TrafficRecord) -> Finding:
    """Test the windows against the version's benchmark. Raises Refusal where conditions differ from it."""
    test = DriftTest(_reference(config, draft, traffic), config.fall, config.average_run_length)
    trimmed = traffic.trimmed(config.keep_windows, test)
    if trimmed != traffic:
        _store(config).write(trimmed)
    verdict = judge(trimmed, test)
    finding = Finding(draft, trimmed, test, verdict, trimmed.due(verdict, config.quiet_hours * 3600))
    get_run_logger().info(finding.summary)
    return finding


def _reference(config: WatchConfig, draft: RegisteredDraft, traffic: TrafficRecord) -> Reference:
    """The benchmark's requests at the served lookahead."""
    counts = read_request_counts(config.tracking_uri or tracking_uri(), draft)
    of_kind = counts.greedy if config.traffic == "greedy" else counts.sampled
    lookahead = traffic.served.lookahead if traffic.served else counts.conditions.lookahead
    if lookahead not in of_kind:
        raise Refusal(
            f"the servers decode at lookahead {lookahead}, the benchmark of version {draft.version} knows "
            f"{min(of_kind)} to {max(of_kind)}: other conditions are no drift; serve at one of these, or raise "
            "benchmark.max_lookahead and retrain"
        )
    return Reference.of(of_kind[lookahead])


@task(name="sample requests", **RETRIES)
def sample_requests(config: WatchConfig, logs: RequestLogConfig) -> PromptsRecord:
    """Take fresh prompts from the request logs, without secrets and personal data, in a process of its own."""
    folder = runs_folder() / "drift" / config.draft
    settings = folder / "requests.json"
    write_atomically(settings, logs)
    command = module("models.data.request_log", settings, folder)
    process = start("request-log", command, Owner("watch-traffic", folder / "logs"))
    try:
        process.wait(SAMPLING_TIMEOUT_S, on_line=get_run_logger().info)
    finally:
        process.stop()
    return PromptsRecord.read(folder / "prompts.json")


@task(name="announce drift", **RETRIES)
def announce_drift(config: WatchConfig, finding: Finding, prompts: PromptsRecord | None) -> Finding:
    """Emit the event that starts retraining, and note that it was: each alarm is announced once."""
    served = finding.traffic.served
    assert served
    payload = {
        "draft": config.draft,
        "version": finding.draft.version,
        "run": finding.draft.tags.get(RUN, ""),
        "summary": finding.summary,
        "lookahead": served.lookahead,
        "traffic": served.traffic,
        "acceptance_length_benchmark": round(finding.test.reference.length, 4),
        "acceptance_length_served": round(mean_length(finding.traffic.current[-RECENT:]), 4),
        "windows": len(finding.traffic.current),
        "average_run_length": config.average_run_length,
        "dataset": prompts.path if prompts else "",
        "dataset_sha256": prompts.sha256 if prompts else "",
        "prompts": prompts.prompts if prompts else 0,
    }
    return _announce(config, finding, DRIFTED, payload)


@task(name="announce degradation", **RETRIES)
def announce_degradation(config: WatchConfig, finding: Finding) -> Finding:
    """Emit the event that starts a rollback, once."""
    before, now = (mean_length(windows[-RECENT:]) for windows in (finding.traffic.replaced, finding.traffic.current))
    reason = f"{finding.summary}; the version that it replaced reached {before:.2f}, it reaches {now:.2f}"
    payload = {"draft": config.draft, "version": finding.draft.version, "reason": reason}
    return _announce(config, finding, DEGRADED, payload)


def _announce(config: WatchConfig, finding: Finding, event: str, payload: Mapping[str, object]) -> Finding:
    assert finding.due
    resource = {"prefect.resource.id": config.draft, "prefect.resource.name": config.draft}
    emit_event(event, resource, payload=dict(payload), id=finding.traffic.event_id(finding.due))
    announced = finding.traffic.with_announced(finding.due)
    _store(config).write(announced)
    get_run_logger().warning("announced as %s: %s", event, finding.summary)
    return Finding(finding.draft, announced, finding.test, finding.verdict, None)


@task(name="show traffic", **RETRIES)
def show_traffic(finding: Finding) -> None:
    """The last windows and the statistic, in words and as a table, as a Markdown artifact."""
    text = traffic_markdown(finding.draft, finding.traffic, finding.test, finding.verdict)
    create_markdown_artifact(
        text, key=artifact_key(finding.draft.name), description=f"Served traffic of {finding.draft.name}"
    )


def _store(config: WatchConfig) -> TrafficStore:
    return TrafficStore(config.folder or str(Path(runs_folder()) / "drift"))
