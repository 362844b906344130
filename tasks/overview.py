"""All drafts at a glance: what serves, what it accepts, what runs next, and what needs a person."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowFilter, FlowRunFilter
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.sorting import FlowRunSort

from infra.drift.traffic import TrafficRecord, TrafficStore, TrafficWindow, mean_length
from infra.network.health import public
from infra.quantities import duration, signed
from infra.records.acceptance import RegisteredDraft
from infra.settings import prefect_api_url, runs_folder, tracking_uri
from infra.templates import render
from infra.tracking.registry import CHALLENGER, CHAMPION, PromotionDecision, history, list_drafts
from tasks.draft_deployments import draft_tag
from tasks.side_effects import side_effect

PAGES = Path(__file__).parent / "report"
RECENT, SHOWN = 10, 24
BLOCKS = "▁▂▃▄▅▆▇█"
RETRAIN, PROMOTE = "retrain", "promote"
FLOWS = (RETRAIN, PROMOTE, "benchmark-champion", "regenerate")
LOOKED_AT = 10
"""Newest flow runs of a draft and flow that are looked at."""
ENDED = (StateType.FAILED, StateType.CRASHED, StateType.COMPLETED, StateType.CANCELLED)
BAD = (StateType.FAILED, StateType.CRASHED)
FlowRuns = Mapping[str, Sequence[FlowRun]]
"""By flow, newest first."""


@dataclass(frozen=True)
class DraftRow:
    """One draft."""

    draft: str
    target: str
    serves: str
    """The champion's version and age."""
    benchmarked: float | None
    windows: Sequence[TrafficWindow]
    """The champion's traffic, oldest first."""
    drift: str
    last_run: str
    next_run: str
    wanted: Sequence[str]
    """What needs a person."""

    @property
    def recently(self) -> str:
        """What the servers reported, against the benchmark."""
        if not self.windows:
            return "no traffic seen"
        now = mean_length(self.windows[-RECENT:])
        change = f" ({signed(now / self.benchmarked - 1)})" if self.benchmarked else ""
        return f"{now:.2f}{change}"

    @property
    def sparkline(self) -> str:
        """The windows as a line of blocks, between the lowest and the highest."""
        lengths = [window.length for window in self.windows[-SHOWN:]]
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
    store, now = TrafficStore(str(runs_folder() / "drift")), time.time()
    rows = [
        row_of(of, history(uri, draft), store.read(draft), runs, now)
        for (draft, of), runs in zip(versions.items(), _runs(list(versions)), strict=True)
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
    retrained = (runs or {}).get(RETRAIN, ())
    last = next((run for run in retrained if run.start_time), None)
    planned = sorted(at for run in retrained if (at := _scheduled_at(run)) is not None)
    return DraftRow(
        draft=newest.name,
        target=newest.tags.get("target", ""),
        serves=_serves(champion, decisions, now),
        benchmarked=champion.acceptance_length if champion else None,
        windows=_windows(traffic, champion),
        drift=_drift(traffic, champion),
        last_run="unknown" if runs is None else _told(last, now) if last else "none",
        next_run="unknown" if runs is None else f"in {_about(planned[0] - now)}" if planned else "none",
        wanted=[*_versions_wanted(versions, decisions), *_servers_wanted(traffic, champion), *_runs_wanted(runs or {})],
    )


def _serves(champion: RegisteredDraft | None, decisions: Sequence[PromotionDecision], now: float) -> str:
    if champion is None:
        return "none"
    since = [one.at for one in decisions if one.champion_after == champion.version]
    age = f", for {_about(now - since[-1])}" if since else ""
    return f"version {champion.version}{age}"


def _about(seconds: float) -> str:
    """`3 days`, not `3 days 0 h`."""
    return duration(max(0.0, seconds)).partition(" 0 ")[0]


def _windows(traffic: TrafficRecord, champion: RegisteredDraft | None) -> Sequence[TrafficWindow]:
    own = [series for series in traffic.series if champion and series.served.version == champion.version]
    return own[-1].windows if own else ()


def _drift(traffic: TrafficRecord, champion: RegisteredDraft | None) -> str:
    own = [series for series in traffic.series if champion and series.served.version == champion.version]
    if not own:
        return "not watched"
    announced = max((end for series in own for end in series.announced), default=None)
    if announced is None:
        return f"no alarm in {sum(series.num_windows for series in own)} windows"
    return f"alarm on {time.strftime('%Y-%m-%d', time.gmtime(announced))}"


def _versions_wanted(versions: Sequence[RegisteredDraft], decisions: Sequence[PromotionDecision]) -> Iterator[str]:
    decided = {one.version for one in decisions}
    for one in versions:
        if CHALLENGER in one.aliases and one.version not in decided and one.tags.get("gate") == "passed":
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


def _runs(drafts: Sequence[str]) -> list[FlowRuns | None]:
    """Flow runs of each draft's own deployments; None where there is no server."""
    if prefect_api_url() is None:
        return [None] * len(drafts)
    with get_client(sync_client=True) as client:
        return [{flow: _newest(client, draft, flow) for flow in FLOWS} for draft in drafts]


def _newest(client: SyncPrefectClient, draft: str, flow: str) -> list[FlowRun]:
    return client.read_flow_runs(
        flow_filter=FlowFilter.model_validate({"name": {"any_": [flow]}}),
        flow_run_filter=FlowRunFilter.model_validate({"tags": {"all_": [draft_tag(draft)]}}),
        sort=FlowRunSort.EXPECTED_START_TIME_DESC,
        limit=LOOKED_AT,
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
