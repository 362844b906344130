"""Served traffic in words and as a table, for Prefect's pages."""

import re
from datetime import UTC, datetime

from infra.drift.sequential import LEARNED_WINDOWS, DriftTest
from infra.drift.windows import TrafficRecord, Verdict, mean_length
from infra.results import RegisteredDraft

SHOWN = 40
BAR = 20


def artifact_key(draft: str) -> str:
    """Prefect wants lower-case letters, digits and dashes."""
    return "traffic-" + re.sub(r"[^a-z0-9]+", "-", draft.lower()).strip("-")


def in_words(draft: RegisteredDraft, traffic: TrafficRecord, test: DriftTest, verdict: Verdict) -> str:
    """One line: what is served, and what the test says of it."""
    windows, length = traffic.current, test.reference.length
    subject = f"version {draft.version} of {draft.name}"
    if not windows:
        return f"{subject}: no window yet, {traffic.open.steps} verification steps so far"
    recent = windows[-10:]
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
    return f"{figures}; {said}"


def traffic_markdown(draft: RegisteredDraft, traffic: TrafficRecord, test: DriftTest, verdict: Verdict) -> str:
    """The figures, what they mean, and the last windows."""
    reference, last = test.reference, verdict.statistics[-1] if verdict.statistics else None
    lines = [
        f"# {draft.name}",
        "",
        in_words(draft, traffic, test, verdict) + ".",
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
    shown = list(zip(traffic.current, verdict.statistics, strict=True))
    for index, (window, statistic) in list(enumerate(shown))[-SHOWN:]:
        mark = " alarm" if index in verdict.alarms else ""
        lines.append(
            f"| {_time(window.ended)} | {window.requests} | {window.steps} | {window.length:.3f} | "
            f"{_bar((window.length - 1) / (reference.length * 1.2 - 1))} | {_bar(test.share(statistic))}{mark} |"
        )
    return "\n".join(lines) + "\n"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M")


def _bar(share: float) -> str:
    return "█" * max(0, min(BAR, round(BAR * share))) or "·"
