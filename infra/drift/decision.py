"""What an alarm calls for: retraining, a rollback, or nothing.

An alarm is about one version. Only the champion's alarms call for anything: a version that is being replaced is
retired by the rollout, and retraining would begin from the champion, of which its alarm says nothing.

- Rollback: soon after the champion began to serve, it accepts less than the version that it replaced, by half of the
  fall that the test is made for. A canary is enough for that: both versions are measured under the same traffic, and
  waiting for the rollout would put a worse version on more servers.
- Retraining: more than half of the servers run the champion, and the alarm came while they did. Retraining is costly
  and its prompts come from all requests, so a share of them that a few canaries got is no ground for it.

Windows of different versions are never pooled: each has a reference of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from infra.drift.config import WatchConfig
from infra.drift.sequential import DriftTest
from infra.drift.traffic import DAY_S, DriftVerdict, Series, TrafficRecord, TrafficWindow, judge, mean_length
from infra.network.health import public
from infra.records.acceptance import RegisteredDraft
from infra.tracking.registry import REPLACES

RECENT = 10
"""Windows that a comparison takes."""


@dataclass(frozen=True)
class DriftFinding:
    """The result of testing one version's traffic."""

    draft: RegisteredDraft
    """The version that serves."""
    series: Series
    test: DriftTest
    verdict: DriftVerdict
    due: TrafficWindow | None = None
    """The window whose alarm is to be announced."""
    event: Literal["drifted", "degraded"] | None = None
    """As what."""
    held: str = ""
    """Why an alarm calls for nothing."""
    replaced: Sequence[TrafficWindow] = ()
    """Windows of the version that this one replaced."""


def assess(
    record: TrafficRecord,
    series: Series,
    draft: RegisteredDraft,
    champion: RegisteredDraft,
    test: DriftTest,
    config: WatchConfig,
    *,
    newest: int | None = None,
) -> DriftFinding:
    """Test one version's windows, and decide what an alarm calls for.

    Args:
        record: of all the draft's traffic.
        series: the version's windows.
        draft: the version that served them.
        champion: the version that is to serve.
        test: against the version's own benchmark.
        config: of the watch.
        newest: the newest registered version; None: unknown.
    """
    verdict = judge(series, test)
    alarm = series.due(verdict, config.quiet_hours * 3600)
    before = draft.tags.get(REPLACES)
    replaced = record.before_version(int(before), series)[-RECENT:] if before else ()
    finding = DriftFinding(draft, series, test, verdict, replaced=replaced)
    if alarm is None:
        return finding
    if draft.version != champion.version:
        return replace(finding, held=f"version {champion.version} is champion: finish its rollout")
    if record.num_windows(draft.version) <= config.probation_windows and is_the_versions_fault(finding):
        return replace(finding, due=alarm, event="degraded")
    if alarm.ended <= record.announced(draft.version) + config.quiet_hours * 3600:
        held = f"it came within {config.quiet_hours:g} hours of an announced alarm or change of the target"
        return replace(finding, held=held)
    held = _not_yet(finding, alarm, record) or _passing(finding, newest)
    return replace(finding, held=held) if held else replace(finding, due=alarm, event="drifted")


def _not_yet(finding: DriftFinding, alarm: TrafficWindow, record: TrafficRecord) -> str:
    """Why an alarm waits for the champion's rollout; empty where most servers run it."""
    leading, version = record.leading, finding.draft.version
    silent = ", ".join(public(url) for url in record.silent if record.servers[url].version != version)
    if leading is None or leading.version != version:
        others = f"another version, or have not answered for less than a day ({silent})" if silent else ""
        return f"most servers run {others or 'another version'}: retraining waits for the rollout"
    return "the alarm came while most servers ran another version" if alarm.ended <= leading.since else ""


def _passing(finding: DriftFinding, newest: int | None) -> str:
    """Why an alarm calls for no retraining (yet); empty for a fall that has lasted for a day.

    A test of windows takes hours in which everybody asks something hard for a fall. And a fall that was made known
    before, and that retraining has not mended, is no reason to train again until there is a further one. Neither
    a retraining that failed, which has registered no version, nor one that still runs after `quiet_hours` is a reason
    to wait.
    """
    series, fall = finding.series, finding.test.fall
    if not series.dropped and sum(window.service_s for window in series.windows) < DAY_S:
        return "it has served for less than a day: retraining waits until a day has been seen"
    mean, benchmark = mean_length(series.last_day()), finding.test.reference.length
    retrained = series.newest_then is None or newest is None or newest > series.newest_then
    if retrained and series.fallen_to is not None and mean >= (1 - fall / 2) * series.fallen_to:
        return f"it has not fallen further than to the {series.fallen_to:.2f} of the alarm before"
    if mean >= (1 - fall / 2) * benchmark:
        return (
            f"over the last day of service it accepts {mean:.2f}, not {fall / 2:.0%} less than the benchmark's "
            f"{benchmark:.2f}: retraining waits for a fall that lasts"
        )
    return ""


def is_the_versions_fault(finding: DriftFinding) -> bool:
    """Whether a version accepts less than the one that it replaced by half of the test's fall."""
    if not finding.replaced:
        return False
    least = (1 - finding.test.fall / 2) * mean_length(finding.replaced)
    return mean_length(finding.series.windows[-RECENT:]) < least
