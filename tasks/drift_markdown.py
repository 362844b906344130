"""Served traffic as Markdown, for Prefect's pages."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from infra.drift.decision import RECENT, DriftFinding
from infra.drift.sequential import LEARNED_WINDOWS
from infra.drift.traffic import TrafficRecord
from infra.drift.windows import mean_length
from infra.network.health import public
from infra.records.acceptance import RegisteredDraft

SHOWN = 40
BAR = 20


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


def traffic_markdown(
    name: str,
    champion: RegisteredDraft,
    traffic: TrafficRecord,
    unknown: Mapping[str, str],
    findings: Sequence[DriftFinding],
) -> str:
    """What each server runs, and for every served version its figures, what they mean, and the last windows."""
    lines = [f"# {name}", "", f"Version {champion.version} is champion.", "", "| server | runs |", "|---|---|"]
    for url, state in sorted(traffic.servers.items()):
        known = "unknown: " + unknown.get(url, "") if state.version is None else f"version {state.version}"
        lines.append(f"| {public(url)} | {unknown.get(url, known) if state.version else known} |")
    for finding in findings:
        lines += ["", *_version_markdown(finding)]
    return "\n".join(lines) + "\n"


def _version_markdown(finding: DriftFinding) -> list[str]:
    test, verdict, windows = finding.test, finding.verdict, finding.series.windows
    reference, last = test.reference, verdict.statistics[-1] if verdict.statistics else None
    lines = [
        f"## Version {finding.draft.version}, lookahead {finding.series.served.lookahead}",
        "",
        in_words(finding) + ".",
        "",
        f"Tested for a fall of {test.fall:.0%} against {len(reference.requests)} benchmarked conversations: acceptance "
        f"length {reference.length:.3f}, lower 97.5 % bound {reference.lower_bound:.3f}; windows below "
        f"{test.middle:.3f} speak for a fall. At least {test.arl:.0f} windows pass to a false alarm, on average.",
    ]
    if last and last.dispersion > 2:
        lines += [
            "",
            f"Windows vary {last.dispersion:.1f} times as much as their requests explain: the mix of requests changes "
            "from window to window, and the test is that much slower.",
        ]
    lines += [
        "",
        f"| ended (UTC) | requests | steps | acceptance length | 1 to {reference.length * 1.2:.1f} | statistic |",
        "|---|---:|---:|---:|---|---|",
    ]
    shown = list(zip(windows, verdict.statistics, strict=True))
    for index, (window, statistic) in list(enumerate(shown))[-SHOWN:]:
        mark = " alarm" if index in verdict.alarms else ""
        lines.append(
            f"| {_time(window.ended)} | {window.requests} | {window.steps} | {window.length:.3f} | "
            f"{_bar((window.length - 1) / (reference.length * 1.2 - 1))} | {_bar(test.share(statistic))}{mark} |"
        )
    return lines


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def _bar(share: float) -> str:
    return "█" * max(0, min(BAR, round(BAR * share))) or "·"
