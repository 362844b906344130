"""All drafts at a glance: what serves, what it accepts, what runs next, and what needs a person."""

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowFilter, FlowRunFilter
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort

from infra.drift.traffic import Series, TrafficRecord, mean_length
from infra.network.health import public
from infra.quantities import duration, plural, signed
from infra.records.acceptance import RegisteredDraft
from infra.refusal import first_line
from infra.settings import prefect_api_url, tracking_uri
from infra.templates import render
from infra.tracking.registry import (
    CHALLENGER,
    CHAMPION,
    COST,
    GATE,
    GOODPUT,
    GPU_BUSY,
    GPU_HOURS,
    TRAFFIC,
    PromotionDecision,
    history,
    list_drafts,
    number_in,
)
from tasks.drift import traffic_store, watch_folders
from tasks.side_effects import draft_tag, side_effect

PAGES = Path(__file__).parent / "report"
RECENT, SHOWN = 10, 24
BLOCKS = "▁▂▃▄▅▆▇█"
RETRAIN, PROMOTE = "retrain", "promote"
FLOWS = (RETRAIN, PROMOTE, "rollback", "benchmark-champion", "watch-traffic", "regenerate")
LOOKED_AT = 10
"""Newest flow runs of a draft and flow that are looked at."""
PAGE = 200
"""Flow runs in one answer of Prefect, at most."""
ENDED = (StateType.FAILED, StateType.CRASHED, StateType.COMPLETED, StateType.CANCELLED)
BAD = (StateType.FAILED, StateType.CRASHED)
FlowRuns = Mapping[str, Sequence[FlowRun]]
"""By flow; see `runs_of`."""


@dataclass(frozen=True)
class DraftRow:
    """One draft."""

    draft: str
    target: str
    serves: str
    """The champion's version and age."""
    benchmarked: float | None
    series: Series | None
    """The champion's newest traffic."""
    comparable: bool
    """Whether that was decoded as the benchmark's figure was."""
    drift: str
    last_run: str
    next_run: str
    goodput: str
    """What the champion's benchmark predicts at its load; empty: not predicted."""
    wanted: Sequence[str]
    """What needs a person."""
    champion: int | None = None
    gpu_hours: float = 0.0
    """What its versions have taken together, like `cost`, in dollars."""
    gpu_busy: float | None = None
    """The share of these hours in which a kernel ran, over the versions for which it was measured."""
    cost: float = 0.0
    servers: Mapping[str, int] = field(default_factory=dict)
    """How many servers run each version, or `unknown`, when they were looked at last."""
    alarms: int = 0
    """Of drift, about the champion."""
    retrained_at: float | None = None
    """When the last retraining started, in seconds since 1970."""

    @property
    def used(self) -> str:
        """What its versions have taken together."""
        if not self.gpu_hours:
            return "no GPU"
        busy = "" if self.gpu_busy is None else f", {self.gpu_busy:.0%} busy"
        return f"{self.gpu_hours:,.1f} GPU-hours{busy}" + (f", ${self.cost:,.2f}" if self.cost else "")

    @property
    def recent_length(self) -> float | None:
        """Acceptance length over the champion's last windows."""
        return mean_length(self.series.windows[-RECENT:]) if self.series and self.series.windows else None

    @property
    def recently(self) -> str:
        """What the servers reported, against the benchmark."""
        now = self.recent_length
        if self.series is None or now is None:
            return "no traffic seen"
        served = self.series.served
        if self.comparable and self.benchmarked:
            return f"{now:.2f} ({signed(now / self.benchmarked - 1)})"
        return f"{now:.2f}, {served.traffic} at lookahead {served.lookahead}"

    @property
    def sparkline(self) -> str:
        """The windows as a line of blocks, between the lowest and the highest."""
        lengths = [window.length for window in self.series.windows[-SHOWN:]] if self.series else []
        low, high = min(lengths, default=0), max(lengths, default=0)
        if high == low:
            return BLOCKS[3] * len(lengths)
        return "".join(BLOCKS[round((length - low) / (high - low) * (len(BLOCKS) - 1))] for length in lengths)


def read_drafts(uri: str | None = None) -> list[DraftRow]:
    """Every registered draft, those that need a person first."""
    uri = uri or tracking_uri()
    versions: dict[str, list[RegisteredDraft]] = {}
    for version in list_drafts(uri):
        versions.setdefault(version.name, []).append(version)
    runs, folders = _known_to_prefect(list(versions))
    rows = [
        row_of(of, history(uri, draft), traffic_store(folders.get(draft)).read(draft), runs.get(draft), time.time())
        for draft, of in versions.items()
    ]
    return sorted(rows, key=lambda row: (not row.wanted, row.draft))


def row_of(
    versions: Sequence[RegisteredDraft],
    decisions: Sequence[PromotionDecision],
    traffic: TrafficRecord,
    runs: FlowRuns | None,
    now: float,
) -> DraftRow:
    """One draft's row, from its versions, newest first; `runs`: None without a Prefect server."""
    newest = versions[0]
    champion = next((one for one in versions if CHAMPION in one.aliases), None)
    own = [series for series in traffic.series if champion and series.served.version == champion.version]
    retrained = (runs or {}).get(RETRAIN, ())
    last = next((run for run in retrained if run.start_time), None)
    planned = [at for run in retrained if (at := _scheduled_at(run)) is not None]
    return DraftRow(
        draft=newest.name,
        target=newest.tags.get("target", ""),
        serves=_serves(champion, decisions, now),
        benchmarked=champion.acceptance_length if champion else None,
        series=own[-1] if own else None,
        comparable=bool(own and champion and _as_benchmarked(own[-1], champion)),
        drift=_drift(own),
        last_run="unknown" if runs is None else _told(last, now) if last else "none",
        next_run="unknown" if runs is None else f"in {_about(min(planned) - now)}" if planned else "none",
        goodput=champion.tags.get(GOODPUT, "") if champion else "",
        wanted=[*_versions_wanted(versions, decisions), *_servers_wanted(traffic, champion), *_runs_wanted(runs or {})],
        champion=champion.version if champion else None,
        gpu_hours=sum(number_in(one.tags, GPU_HOURS) or 0.0 for one in versions),
        gpu_busy=_busy(versions),
        cost=sum(number_in(one.tags, COST) or 0.0 for one in versions),
        servers=Counter(str(state.version or "unknown") for state in traffic.servers.values()),
        alarms=sum(len(series.announced) for series in own),
        retrained_at=last.start_time.timestamp() if last and last.start_time else None,
    )


def _serves(champion: RegisteredDraft | None, decisions: Sequence[PromotionDecision], now: float) -> str:
    if champion is None:
        return "none"
    since = [one.at for one in decisions if one.champion_after == champion.version]
    age = f", for {_about(now - since[-1])}" if since else ""
    return f"version {champion.version}{age}"


def _busy(versions: Sequence[RegisteredDraft]) -> float | None:
    read = [(number_in(one.tags, GPU_HOURS), number_in(one.tags, GPU_BUSY)) for one in versions]
    measured = [(held, share) for held, share in read if held is not None and share is not None]
    hours = sum(held for held, _ in measured)
    return sum(held * share for held, share in measured) / hours if hours else None


def _about(seconds: float) -> str:
    """`3 days`, not `3 days 0 h`."""
    return duration(max(0.0, seconds)).partition(" 0 ")[0]


def _as_benchmarked(series: Series, champion: RegisteredDraft) -> bool:
    served, tags = series.served, champion.tags
    return (served.traffic, str(served.lookahead)) == (tags.get(TRAFFIC), tags.get("lookahead"))


def _drift(own: Sequence[Series]) -> str:
    if not own:
        return "not watched"
    announced = max((end for series in own for end in series.announced), default=None)
    if announced is None:
        return f"no alarm in {plural(sum(series.num_windows for series in own), 'window')}"
    return f"alarm on {time.strftime('%Y-%m-%d', time.gmtime(announced))}"


def _versions_wanted(versions: Sequence[RegisteredDraft], decisions: Sequence[PromotionDecision]) -> Iterator[str]:
    decided = {one.version for one in decisions}
    for one in versions:
        if CHALLENGER in one.aliases and one.version not in decided and one.tags.get(GATE) == "passed":
            yield f"approve or refuse version {one.version}, which passed the gate"


def _servers_wanted(traffic: TrafficRecord, champion: RegisteredDraft | None) -> Iterator[str]:
    for server, state in sorted(traffic.servers.items()):
        if state.version is None:
            yield f"{public(server)} serves an unknown draft"
        elif champion and state.version != champion.version:
            yield f"{public(server)} serves version {state.version}"


def _runs_wanted(runs: FlowRuns) -> Iterator[str]:
    for flow, of in runs.items():
        ended = next((run for run in of if run.state_type in ENDED), None)
        if ended is not None and ended.state_type in BAD:
            yield f"{flow}: {ended.name} has {(ended.state_name or 'failed').lower()}"


def _scheduled_at(run: FlowRun) -> float | None:
    if run.state_type != StateType.SCHEDULED or run.expected_start_time is None:
        return None
    return run.expected_start_time.timestamp()


def _told(run: FlowRun, now: float) -> str:
    assert run.start_time
    return f"{run.name}, {(run.state_name or '').lower()}, {_about(now - run.start_time.timestamp())} ago"


def _known_to_prefect(drafts: Sequence[str]) -> tuple[dict[str, FlowRuns], dict[str, str | None]]:
    """Flow runs of each draft, and where the traffic of each watched one is kept; both empty without a server, and
    where that is away or denies, which is said on stderr."""
    if not drafts or (url := prefect_api_url()) is None:
        return {}, {}
    try:
        with get_client(sync_client=True) as client:
            return runs_of(client, drafts), watch_folders(client)
    except (httpx.HTTPError, json.JSONDecodeError) as error:
        answer = error.response if isinstance(error, httpx.HTTPStatusError) else None
        why = f"{answer.status_code} {answer.reason_phrase}" if answer else first_line(error)
        said = f"Prefect at {public(url)} does not tell of its runs ({why}): they are shown as unknown"
        print(said, file=sys.stderr, flush=True)
        return {}, {}


def runs_of(client: SyncPrefectClient, drafts: Sequence[str]) -> dict[str, FlowRuns]:
    """The newest runs of each draft's flows, newest first; retrainings after the next ones that are scheduled."""
    runs = {flow: _by_draft(client, flow, drafts, waiting=False) for flow in FLOWS}
    planned = _by_draft(client, RETRAIN, drafts, waiting=True)
    return {
        draft: {flow: [*planned[draft][:1], *of[draft]] if flow == RETRAIN else of[draft] for flow, of in runs.items()}
        for draft in drafts
    }


def _by_draft(
    client: SyncPrefectClient, flow: str, drafts: Sequence[str], *, waiting: bool
) -> dict[str, list[FlowRun]]:
    """Each draft's runs of a flow: scheduled ones, the next first, or all others, the newest first."""
    runs = _read_runs(client, flow, drafts, waiting=waiting, limit=PAGE)
    found = {draft: [run for run in runs if draft_tag(draft) in run.tags][:LOOKED_AT] for draft in drafts}
    if len(runs) == PAGE:
        # Drafts with many runs have filled the page: those of which it says too little are asked about one by one.
        for draft, of in found.items():
            if not (of if waiting else any(run.state_type in ENDED for run in of)):
                found[draft] = _read_runs(client, flow, [draft], waiting=waiting, limit=LOOKED_AT)
    return found


def _read_runs(
    client: SyncPrefectClient, flow: str, drafts: Sequence[str], *, waiting: bool, limit: int
) -> list[FlowRun]:
    state = {"type": {"any_" if waiting else "not_any_": [StateType.SCHEDULED]}}
    tags = {"any_": [draft_tag(draft) for draft in drafts]}
    return client.read_flow_runs(
        flow_filter=FlowFilter.model_validate({"name": {"any_": [flow]}}),
        flow_run_filter=FlowRunFilter.model_validate({"tags": tags, "state": state}),
        sort=FlowRunSort.EXPECTED_START_TIME_ASC if waiting else FlowRunSort.EXPECTED_START_TIME_DESC,
        limit=limit,
    )


def page_of(rows: Sequence[DraftRow]) -> str:
    """A page of its own, HTML."""
    return render(PAGES / "overview.html.jinja", rows=rows, at=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()))


@side_effect("show all drafts")
def show_drafts(uri: str) -> None:
    """The same as a Markdown artifact."""
    rows = read_drafts(uri)
    create_markdown_artifact(
        render(PAGES / "overview.md.jinja", rows=rows), key="drafts", description=f"{len(rows)} registered drafts"
    )
