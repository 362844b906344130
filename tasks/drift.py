"""Watches served traffic: windows per version, the drift test, fresh prompts, events."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.events import emit_event

from infra.drift.config import RequestLogConfig, WatchConfig
from infra.drift.decision import RECENT, DriftFinding, assess
from infra.drift.identity import identify_all
from infra.drift.scrape import scrape
from infra.drift.sequential import DriftTest, Reference
from infra.drift.traffic import TrafficRecord, TrafficStore
from infra.drift.windows import Series, mean_length
from infra.files.atomic import write_atomically
from infra.network.health import public
from infra.processes.process import Owner, module, start
from infra.records.acceptance import RegisteredDraft
from infra.records.data_path import PromptsRecord
from infra.refusal import Refusal
from infra.settings import runs_folder, tracking_uri
from infra.tracking.registry import CHAMPION, RUN, list_drafts, read_request_counts
from tasks.drift_markdown import in_words, traffic_markdown
from tasks.side_effects import artifact_key, side_effect

DRIFTED = "draftsmith.draft.drifted"
"""The event that starts retraining; its resource is the registered model."""
DEGRADED = "draftsmith.draft.degraded"
"""The event that starts a rollback: a version serves worse than the one that it replaced."""
UNKNOWN = "draftsmith.server.unknown_draft"
"""The event for a server with an unregistered draft; its resource is the registered model."""
ENDED_WINDOWS = 200
"""Newest windows that are kept of a version that no server runs any more: what a later version is compared with."""
SAMPLING_TIMEOUT_S = 2 * 3600.0


@dataclass(frozen=True)
class TrafficScan:
    """One look at the servers."""

    versions: Mapping[int, RegisteredDraft]
    """All registered versions, by number."""
    champion: RegisteredDraft
    traffic: TrafficRecord
    unknown: Mapping[str, str]
    """Servers that run none of the versions as they were benchmarked, and why."""


@side_effect("observe traffic")
def observe_traffic(config: WatchConfig) -> TrafficScan:
    """Scrape the servers, find out which version each runs, and append windows to the record."""
    logger = get_run_logger()
    drafts = list_drafts(config.tracking_uri or tracking_uri(), config.draft)
    champion = next((draft for draft in drafts if CHAMPION in draft.aliases), None)
    if champion is None:
        raise Refusal(f"{config.draft} has no champion to watch: promote one with `draftsmith drafts promote`")
    seen = scrape(config.servers, config.timeout_s)
    for url, why in seen.silent.items():
        logger.warning("%s does not answer: %s", public(url), why)
    store = _store(config)
    before = store.read(config.draft)
    found = identify_all(before, seen, drafts)
    after = before.observe(
        seen,
        {url: identity.version for url, identity in found.items()},
        config.traffic,
        time.time(),
        config.window_steps,
    )
    store.write(after)
    unknown = {url: identity.reason for url, identity in found.items() if identity.version is None}
    for url, reading in seen.readings.items():
        if url not in unknown and reading.is_tree:
            unknown[url] = (
                f"it verifies {reading.draft_tokens} tokens at a lookahead of {reading.lookahead}, a tree; the "
                "benchmark's figure is of chains, so serve with --speculative-eagle-topk 1"
            )
    return TrafficScan({draft.version: draft for draft in drafts}, champion, after, unknown)


@side_effect("report unknown drafts")
def report_unknown(config: WatchConfig, look: TrafficScan) -> TrafficScan:
    """Warn of servers that run no registered version, and emit an event about each, once per start."""
    new: set[str] = set()
    for url, why in look.unknown.items():
        get_run_logger().warning("%s is not counted: %s", public(url), why)
        state = look.traffic.servers[url]
        if not state.reported:
            new.add(url)
            payload = {"draft": config.draft, "server": public(url), "reason": why}
            emit_event(UNKNOWN, _resource(config), payload=payload, id=look.traffic.event_id("unknown", state.start))
    if not new:
        return look
    traffic = look.traffic.with_reported(new)
    _store(config).write(traffic)
    return replace(look, traffic=traffic)


@side_effect("test for drift")
def judge_traffic(config: WatchConfig, look: TrafficScan) -> tuple[TrafficScan, list[DriftFinding], list[Refusal]]:
    """Test each served version's windows against its own benchmark.

    Returns the look with trimmed windows, a finding for each version, and why a version cannot be tested.
    """
    findings: list[DriftFinding] = []
    refusals: list[Refusal] = []
    traffic, live = look.traffic, [series.served for series in look.traffic.live]
    for series in look.traffic.series:
        draft = look.versions.get(series.served.version)
        if draft is None or (series.served not in live and len(series.windows) <= ENDED_WINDOWS):
            continue
        try:
            test = DriftTest(_reference(config, draft, series), config.fall, config.average_run_length)
        except Refusal as refusal:
            refusals.append(refusal)
            continue
        kept = series.trimmed(config.keep_windows if series.served in live else ENDED_WINDOWS, test)
        traffic = traffic.with_series(kept)
        if series.served in live:
            findings.append(assess(traffic, kept, draft, look.champion, test, config))
    if traffic != look.traffic:
        _store(config).write(traffic)
    for finding in findings:
        get_run_logger().info(in_words(finding))
    for refusal in refusals:
        get_run_logger().warning(str(refusal))
    return replace(look, traffic=traffic), findings, refusals


def _reference(config: WatchConfig, draft: RegisteredDraft, series: Series) -> Reference:
    """The benchmark's requests at the served lookahead."""
    counts = read_request_counts(config.tracking_uri or tracking_uri(), draft)
    of_kind = counts.greedy if config.traffic == "greedy" else counts.sampled
    lookahead = series.served.lookahead
    if lookahead not in of_kind:
        raise Refusal(
            f"the servers decode at lookahead {lookahead}, the benchmark of version {draft.version} knows "
            f"{min(of_kind)} to {max(of_kind)}: other conditions are no drift; serve at one of these, or raise "
            "benchmark.max_lookahead and retrain"
        )
    return Reference.of(of_kind[lookahead])


@side_effect("sample requests")
def sample_requests(config: WatchConfig, logs: RequestLogConfig) -> PromptsRecord:
    """Sample fresh prompts from the request logs, without secrets and personal data, in a child process."""
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


@side_effect("announce drift")
def announce_drift(
    config: WatchConfig, look: TrafficScan, finding: DriftFinding, prompts: PromptsRecord | None
) -> TrafficScan:
    """Emit the event that starts retraining, and note that it was: each alarm is announced once."""
    series = finding.series
    payload = {
        "draft": config.draft,
        "version": finding.draft.version,
        "run": finding.draft.tags.get(RUN, ""),
        "summary": in_words(finding),
        "lookahead": series.served.lookahead,
        "traffic": series.served.traffic,
        "acceptance_length_benchmark": round(finding.test.reference.length, 4),
        "acceptance_length_served": round(mean_length(series.windows[-RECENT:]), 4),
        "windows": series.num_windows,
        "average_run_length": config.average_run_length,
        "dataset": prompts.path if prompts else "",
        "dataset_sha256": prompts.sha256 if prompts else "",
        "prompts": prompts.prompts if prompts else 0,
    }
    return _announce(config, look, finding, DRIFTED, payload)


@side_effect("announce degradation")
def announce_degradation(config: WatchConfig, look: TrafficScan, finding: DriftFinding) -> TrafficScan:
    """Emit the event that starts a rollback, once."""
    before, now = mean_length(finding.replaced), mean_length(finding.series.windows[-RECENT:])
    reason = f"{in_words(finding)}; the version that it replaced reached {before:.2f}, it reaches {now:.2f}"
    payload = {"draft": config.draft, "version": finding.draft.version, "reason": reason}
    return _announce(config, look, finding, DEGRADED, payload)


def _announce(
    config: WatchConfig, look: TrafficScan, finding: DriftFinding, event: str, payload: Mapping[str, object]
) -> TrafficScan:
    assert finding.due
    event_id = look.traffic.event_id(finding.draft.version, finding.due.ended)
    emit_event(event, _resource(config), payload=dict(payload), id=event_id)
    traffic = look.traffic.with_series(finding.series.with_announced(finding.due))
    _store(config).write(traffic)
    get_run_logger().warning("announced as %s: %s", event, payload.get("summary") or payload.get("reason"))
    return replace(look, traffic=traffic)


@side_effect("show traffic")
def show_traffic(config: WatchConfig, look: TrafficScan, findings: list[DriftFinding], refusals: list[Refusal]) -> str:
    """What each server runs, the last windows and the statistics, as a Markdown artifact; returns a summary."""
    text = traffic_markdown(config.draft, look.champion, look.traffic, look.unknown, findings)
    create_markdown_artifact(
        text, key=artifact_key("traffic", config.draft), description=f"Served traffic of {config.draft}"
    )
    said = [in_words(finding) for finding in findings]
    said += [f"{public(url)}: {why}" for url, why in look.unknown.items()]
    if not findings and refusals:
        raise refusals[0]
    if not findings and look.unknown:
        raise Refusal(f"no server runs a registered version of {config.draft}: {'; '.join(said)}")
    return "; ".join([*said, *map(str, refusals)]) or "the servers have not decoded since their start"


def _resource(config: WatchConfig) -> dict[str, str]:
    return {"prefect.resource.id": config.draft, "prefect.resource.name": config.draft}


def _store(config: WatchConfig) -> TrafficStore:
    return TrafficStore(config.folder or str(Path(runs_folder()) / "drift"))
