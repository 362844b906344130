"""Watches served traffic: windows per version, the drift test, fresh prompts, events, and the page of all that."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import SyncPrefectClient

from infra.drift.config import RequestLogConfig, WatchConfig
from infra.drift.decision import RECENT, DriftFinding, assess
from infra.drift.identity import identify_all
from infra.drift.scrape import scrape
from infra.drift.sequential import LEARNED_WINDOWS, DriftTest, Reference, Statistic
from infra.drift.store import TrafficStore
from infra.drift.target import ReportedTarget
from infra.drift.traffic import Series, TrafficRecord, TrafficWindow, mean_length
from infra.files.atomic import write_atomically
from infra.network.health import public
from infra.processes.process import Owner, module, start
from infra.records.acceptance import RegisteredDraft
from infra.records.prompts import PromptsRecord
from infra.refusal import Refusal
from infra.settings import runs_folder, tracking_uri
from infra.templates import render
from infra.tracking.registry import CHAMPION, RUN, list_drafts, read_request_counts
from tasks.deployments import all_pages
from tasks.events import DEGRADED, DRIFTED, FAILED, UNKNOWN, tell
from tasks.side_effects import artifact_key, side_effect

WATCH = "flows.watch_traffic.watch_traffic"
"""Entry point of the deployments that watch traffic."""
ENDED_WINDOWS = 200
"""Newest windows that are kept of a version that no server runs any more: what a later version is compared with."""
SAMPLING_TIMEOUT_S = 2 * 3600.0
PAGE = Path(__file__).parent / "report" / "traffic.md.jinja"
UNSURE = (
    "not counted at this look: too many requests may have generated nothing (scoring, cut streams, short answers with "
    "n > 1), which would look like lost acceptance"
)
SHOWN_WINDOWS = 40
BAR = 20


@dataclass(frozen=True)
class TargetChange:
    """Servers of the champion run another target than before, or run it otherwise."""

    target: ReportedTarget
    words: str
    retrains: bool
    """Whether the recipe names the target that is served now."""


@dataclass(frozen=True)
class TrafficScan:
    """One look at the servers."""

    config: WatchConfig
    versions: Mapping[int, RegisteredDraft]
    """All registered versions, by number."""
    champion: RegisteredDraft
    traffic: TrafficRecord
    unknown: Mapping[str, str]
    """Servers that run none of the versions as they were benchmarked, and why."""
    findings: Sequence[DriftFinding] = ()
    """One for each served version that was tested."""
    refusals: Sequence[Refusal] = ()
    """Why a version cannot be tested."""

    @property
    def alarms(self) -> "Sequence[DriftFinding | TargetChange]":
        """What is to be announced, in this order: a rollback, and one reason to retrain.

        A rollback needs no request log. A version that is rolled back, or whose target has changed, is not retrained
        for a fall as well.
        """
        degraded, drifted = (
            [finding for finding in self.findings if finding.event == event][:1] for event in ("degraded", "drifted")
        )
        return [*degraded, self.change] if self.change else degraded or drifted

    @property
    def left_out(self) -> dict[str, str]:
        """Servers whose traffic since the look before is not counted, and why; unknown ones are not among them."""
        return {url: UNSURE for url, state in self.traffic.servers.items() if state.unsure}

    @property
    def newest(self) -> int:
        """Number of the newest registered version."""
        return max(self.versions)

    @property
    def change(self) -> "TargetChange | None":
        """What changed under the champion and was not made known; None, too, soon after another change."""
        found = self.traffic.change_under(self.champion.version)
        if found is None or time.time() < self.traffic.change_announced + 3600 * self.config.quiet_hours:
            return None
        before, now = found
        return TargetChange(now, before.changes_to(now), retrains=not before.is_another(now))

    def recording(self, traffic: TrafficRecord) -> "TrafficScan":
        """The look with this record, which is stored."""
        if traffic != self.traffic:
            _store(self.config).write(traffic)
        return replace(self, traffic=traffic)


def _store(config: WatchConfig) -> TrafficStore:
    return traffic_store(config.folder)


def traffic_store(folder: str | None) -> TrafficStore:
    """Where traffic is kept by a watch with this `folder`."""
    return TrafficStore(folder or str(runs_folder() / "drift"))


def watch_folders(client: SyncPrefectClient) -> dict[str, str | None]:
    """The `folder` of each draft's watch, by its deployment."""
    found = dict[str, str | None]()
    for deployment in all_pages(client.read_deployments):
        if deployment.entrypoint == WATCH:
            config = deployment.parameters.get("config") or {}
            found[str(config.get("draft"))] = config.get("folder")
    return found


@side_effect("observe traffic")
def observe_traffic(config: WatchConfig) -> TrafficScan:
    """Scrape the servers, find out which version each runs, and append windows to the record."""
    drafts = list_drafts(config.tracking_uri or tracking_uri(), config.draft)
    champion = next((draft for draft in drafts if CHAMPION in draft.aliases), None)
    if champion is None:
        raise Refusal(f"{config.draft} has no champion to watch: promote one with `draftsmith drafts promote`")
    seen = scrape(config.servers, config.timeout_s)
    for url, why in seen.silent.items():
        get_run_logger().warning("%s does not answer: %s", public(url), why)
    for gone in _store(config).remove_prompts(config.draft, config.prompt_days, time.time()):
        get_run_logger().info("removed %s", gone)
    before = _store(config).read(config.draft)
    found = identify_all(before, seen, drafts)
    versions = {url: identity.version for url, identity in found.items()}
    unknown = {url: identity.reason for url, identity in found.items() if identity.version is None}
    for url, reading in seen.readings.items():
        if url not in unknown and reading.uncounted:
            unknown[url] = reading.uncounted
    look = TrafficScan(config, {draft.version: draft for draft in drafts}, champion, before, unknown)
    look = look.recording(before.observe(seen, versions, config.traffic, time.time(), config.window_steps))
    for url, why in look.left_out.items():
        get_run_logger().warning("%s is %s", public(url), why)
    return look


@side_effect("report unknown drafts")
def report_unknown(look: TrafficScan) -> TrafficScan:
    """Warn of servers that run no registered version, and emit an event about each, once per start."""
    new: set[str] = set()
    for url, why in look.unknown.items():
        get_run_logger().warning("%s is not counted: %s", public(url), why)
        state = look.traffic.servers[url]
        if not state.reported:
            new.add(url)
            event_id = look.traffic.event_id("unknown", state.start)
            tell(UNKNOWN, look.config.draft, reason=why, event_id=event_id, server=public(url))
    return look.recording(look.traffic.with_reported(new))


@side_effect("test for drift")
def judge_traffic(look: TrafficScan) -> TrafficScan:
    """Trim each served version's windows, and test them against its own benchmark."""
    config, findings, refusals = look.config, [], []
    traffic, live = look.traffic, [series.served for series in look.traffic.live(config.traffic)]
    for series in look.traffic.series:
        draft = look.versions.get(series.served.version)
        if draft is None or (series.served not in live and len(series.windows) <= ENDED_WINDOWS):
            continue
        try:
            test = DriftTest(_reference(config, draft, series), config.fall, config.average_run_length)
        except Refusal as refusal:
            if series.served in live:
                get_run_logger().warning(str(refusal))
                refusals.append(refusal)
            continue
        kept = series.trimmed(config.keep_windows if series.served in live else ENDED_WINDOWS, test)
        kept = kept.without_mended_fall(test)
        traffic = traffic.with_series(kept)
        if series.served in live:
            findings.append(assess(traffic, kept, draft, look.champion, test, config, newest=look.newest))
            get_run_logger().info(in_words(findings[-1]))
    return replace(look.recording(traffic), findings=findings, refusals=refusals)


def _reference(config: WatchConfig, draft: RegisteredDraft, series: Series) -> Reference:
    """The benchmark's requests of the same kind, at the served lookahead."""
    counts = read_request_counts(config.tracking_uri or tracking_uri(), draft)
    of_kind = counts.greedy if series.served.traffic == "greedy" else counts.sampled
    lookahead = series.served.lookahead
    if not of_kind:
        raise Refusal(
            f"version {draft.version} was benchmarked by {counts.conditions.engine}, which counted greedy text only: "
            "sampled traffic cannot be compared with it"
        )
    if lookahead not in of_kind:
        raise Refusal(
            f"the servers decode at lookahead {lookahead}, the benchmark of version {draft.version} knows "
            f"{min(of_kind)} to {max(of_kind)}: other conditions are no drift; serve at one of these, or raise "
            "benchmark.max_lookahead and retrain"
        )
    return Reference.of(of_kind[lookahead])


@side_effect("sample requests")
def sample_requests(watch: WatchConfig, logs: RequestLogConfig) -> PromptsRecord:
    """Sample fresh prompts from the request logs, without secrets and personal data, in a child process.

    They are kept beside the traffic's windows, where the worker that retrains can read them.
    """
    folder = runs_folder() / "drift" / watch.draft
    settings = folder / "requests.json"
    write_atomically(settings, logs)
    command = module("models.data.request_log", settings, folder)
    process = start("request-log", command, Owner("watch-traffic", folder / "logs"))
    try:
        process.wait(SAMPLING_TIMEOUT_S, on_line=get_run_logger().info)
    finally:
        process.stop()
    found = PromptsRecord.read(folder / "prompts.json")
    return found.model_copy(update={"path": _store(watch).keep_prompts(watch.draft, Path(found.path))})


@side_effect("announce alarm")
def announce(look: TrafficScan, finding: DriftFinding, prompts: PromptsRecord | None = None) -> TrafficScan:
    """Emit the event that starts retraining, or a rollback, and note that it was: each alarm is announced once."""
    assert finding.due
    series, summary, served = finding.series, in_words(finding), mean_length(finding.series.windows[-RECENT:])
    more: dict[str, Any] = {}
    if finding.event == "degraded":
        event, before = DEGRADED, mean_length(finding.replaced)
        summary += f"; the version that it replaced reached {before:.2f}, it reaches {served:.2f}"
    else:
        event = DRIFTED
        more = {
            "lookahead": series.served.lookahead,
            "traffic": series.served.traffic,
            "acceptance_length_benchmark": round(finding.test.reference.length, 4),
            "acceptance_length_served": round(served, 4),
            "windows": series.num_windows,
            "average_run_length": look.config.average_run_length,
            **prompts_of(prompts),
        }
    event_id = look.traffic.event_id(finding.draft.version, finding.due.ended)
    version, run = finding.draft.version, finding.draft.tags.get(RUN, "")
    tell(event, look.config.draft, version=version, reason=summary, run=run, event_id=event_id, **more)
    get_run_logger().warning("announced as %s: %s", event, summary)
    return look.recording(look.traffic.with_series(series.with_announced(finding.due, look.newest)))


@side_effect("announce change of target")
def announce_change(look: TrafficScan, change: TargetChange, prompts: PromptsRecord | None = None) -> TrafficScan:
    """Emit the event that starts retraining, or tells a person that the recipe names another target; once."""
    version, run = look.champion.version, look.champion.tags.get(RUN, "")
    reason = f"the target under version {version} has changed: {change.words}"
    event, more = DRIFTED, prompts_of(prompts)
    if not change.retrains:
        event, more = FAILED, {}
        reason += "; name it in the recipe (target.name), then `draftsmith deploy` it again and retrain"
    event_id = look.traffic.event_id(version, "target", change.target.model_dump_json(), look.traffic.change_announced)
    tell(event, look.config.draft, version=version, reason=reason, run=run, event_id=event_id, **more)
    get_run_logger().warning("announced as %s: %s", event, reason)
    return look.recording(look.traffic.with_change_announced(version, change.target, time.time()))


def prompts_of(prompts: PromptsRecord | None) -> dict[str, Any]:
    """What an event says of fresh prompts."""
    return {
        "dataset": prompts.path if prompts else "",
        "dataset_sha256": prompts.sha256 if prompts else "",
        "prompts": prompts.prompts if prompts else 0,
    }


@side_effect("show traffic")
def show_traffic(look: TrafficScan) -> str:
    """What each server runs, the last windows and the statistics, as a Markdown artifact; returns a summary."""
    draft = look.config.draft
    create_markdown_artifact(
        traffic_markdown(look), key=artifact_key("traffic", draft), description=f"Served traffic of {draft}"
    )
    said = [in_words(finding) for finding in look.findings]
    said += [f"{public(url)}: {why}" for url, why in [*look.unknown.items(), *look.left_out.items()]]
    if not look.findings and look.refusals:
        raise look.refusals[0]
    if not look.findings and look.unknown:
        raise Refusal(f"no server runs a version of {draft} that can be counted: {'; '.join(said)}")
    return "; ".join([*said, *map(str, look.refusals)]) or "the servers have not decoded since their start"


def in_words(finding: DriftFinding) -> str:
    """One line on a served version and its test."""
    draft, series, test, verdict = finding.draft, finding.series, finding.test, finding.verdict
    subject = f"version {draft.version} of {draft.name}"
    if not series.windows:
        return f"{subject}: no window yet, {series.open.steps} verification steps so far"
    windows, length = series.windows, test.reference.length
    recent = windows[-RECENT:]
    served = mean_length(recent)
    figures = (
        f"{subject}: acceptance length {served:.2f} over the last {len(recent)} windows, {served / length - 1:+.1%} "
        f"against its benchmark's {length:.2f}"
    )
    last = verdict.statistics[-1]
    if verdict.alarms and verdict.alarms[-1] == len(windows) - 1:
        said = "the test says that it has fallen"
    elif verdict.alarms:
        when = _time(windows[verdict.alarms[-1]].ended)
        said = f"it had fallen at {when}; the test began anew and stands at {test.share(last):.0%} of its threshold"
    elif last.windows <= LEARNED_WINDOWS:
        said = f"the test is learning how much this traffic varies ({last.windows} of {LEARNED_WINDOWS} windows)"
    else:
        said = f"no fall; the test stands at {test.share(last):.0%} of its threshold"
    return f"{figures}; {said}" + (f" ({finding.held})" if finding.held else "")


def traffic_markdown(look: TrafficScan) -> str:
    """What each server runs, and for every served version its figures, what they mean, and the last windows."""
    servers = []
    for url, state in sorted(look.traffic.servers.items()):
        why = look.unknown.get(url, "")
        left_out = look.left_out.get(url)
        version = f"version {state.version}" + (f"; {left_out}" if left_out else "")
        runs = f"unknown: {why}" if state.version is None else why or version
        servers.append((public(url), runs))
    return render(PAGE, look=look, servers=servers, in_words=in_words, time=_time, bar=_bar, rows=_rows)


def _rows(finding: DriftFinding) -> list[tuple[TrafficWindow, Statistic, bool]]:
    """The last windows, each with the statistic after it and whether it raised an alarm."""
    verdict = finding.verdict
    alarms = [index in verdict.alarms for index in range(len(verdict.statistics))]
    return list(zip(finding.series.windows, verdict.statistics, alarms, strict=True))[-SHOWN_WINDOWS:]


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def _bar(share: float) -> str:
    return "█" * max(0, min(BAR, round(BAR * share))) or "·"
