"""The overview of all drafts, from records."""

from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.settings import PREFECT_API_URL, temporary_settings

from infra.drift.traffic import Counters, Series, ServedSeries, ServerState, TrafficRecord, TrafficWindow
from infra.records.acceptance import RegisteredDraft
from infra.tracking.registry import PromotionDecision, register
from infra.tracking.runs import log_folder, start_run
from tasks.overview import FLOWS, PAGE, DraftRow, page_of, read_drafts, row_of, runs_of

NOW, DAY = 1_800_000_000.0, 86_400.0


def version(number: int, *aliases: str, **tags: str) -> RegisteredDraft:
    return RegisteredDraft(
        name="draft-x",
        version=number,
        model_id="m",
        aliases=aliases,
        acceptance_length=2.0,
        tags={"target": "T", "lookahead": "3", "traffic": "greedy"} | tags,
    )


def promoted(number: int, at: float) -> PromotionDecision:
    return PromotionDecision(
        at=at, version=number, outcome="promoted", champion_before=None, champion_after=number, by="gate", reason=""
    )


def traffic(lengths: list[float], served: int = 1, announced: tuple[float, ...] = ()) -> TrafficRecord:
    windows = [
        TrafficWindow(began=i, ended=i + 1, tokens=round(1000 * length), steps=1000, requests=10)
        for i, length in enumerate(lengths)
    ]
    series = Series(
        served=ServedSeries(version=served, lookahead=3, traffic="greedy"), opened=0, windows=tuple(windows),
        announced=announced,
    )  # fmt: skip
    state = ServerState(start="a", version=served, lookahead=3, counters=Counters())
    return TrafficRecord(draft="draft-x", servers={"http://one": state}, series=(series,))


def run(kind: StateType, at: float, name: str = "r", draft: str = "x") -> FlowRun:
    when = datetime.fromtimestamp(at, UTC)
    started = None if kind == StateType.SCHEDULED else when
    return FlowRun(
        id=uuid4(), flow_id=uuid4(), name=name, state=State(type=kind), state_type=kind, state_name=kind.value.title(),
        start_time=started, expected_start_time=when, tags=[f"draft:{draft}"],
    )  # fmt: skip


class AnsweringClient:
    """Prefect's client over runs of one flow, given newest first."""

    def __init__(self, runs: list[FlowRun]) -> None:
        self.runs, self.requests = runs, 0

    def read_flow_runs(self, *, flow_filter, flow_run_filter, sort, limit: int) -> list[FlowRun]:
        self.requests += 1
        waiting = bool(flow_run_filter.state.type.any_)
        wanted = {*flow_run_filter.tags.any_}
        of_flow = self.runs if flow_filter.name.any_ == ["retrain"] else []
        found = [one for one in of_flow if wanted & {*one.tags} and waiting == (one.state_type == StateType.SCHEDULED)]
        return (found[::-1] if waiting else found)[:limit]


def row(**given) -> DraftRow:
    usual = {"versions": [version(1, "champion")], "decisions": [promoted(1, NOW - 3 * DAY)], "traffic": traffic([2.0]),
             "runs": {}, "now": NOW}  # fmt: skip
    return row_of(**usual | given)


def test_a_healthy_draft_wants_nobody() -> None:
    found = row(
        traffic=traffic([1.9, 2.1, 2.0, 2.0]),
        runs={"retrain": [run(StateType.SCHEDULED, NOW + DAY * 4), run(StateType.COMPLETED, NOW - DAY, "tiny-1")]},
    )
    assert (found.draft, found.target, found.serves) == ("draft-x", "T", "version 1, for 3 days")
    assert (found.recently, found.drift) == ("2.00 (+0.0%)", "no alarm in 4 windows")
    assert found.last_run == "tiny-1, completed, 24 h ago"
    assert found.next_run == "in 4 days"
    assert len(found.sparkline) == 4
    assert list(found.wanted) == []


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (
            {"versions": [version(2, "challenger", gate="passed"), version(1, "champion")]},
            "approve or refuse version 2",
        ),
        ({"traffic": traffic([2.0], served=7)}, "http://one serves version 7"),
        ({"runs": {"retrain": [run(StateType.FAILED, NOW, "tiny-2")]}}, "retrain: tiny-2 has failed"),
        ({"runs": {"benchmark-champion": [run(StateType.CRASHED, NOW, "n")]}}, "benchmark-champion: n has crashed"),
    ],
)
def test_what_needs_a_person(given: dict, wanted: str) -> None:
    assert [what for what in row(**given).wanted if what.startswith(wanted)]


def test_a_failure_that_was_followed_by_a_success_is_over() -> None:
    runs = {"retrain": [run(StateType.COMPLETED, NOW), run(StateType.FAILED, NOW - DAY)]}
    assert not row(runs=runs).wanted
    decided = [promoted(1, NOW - DAY), promoted(2, NOW)]
    assert not row(versions=[version(2, "challenger", gate="passed"), version(1, "champion")], decisions=decided).wanted


def test_other_conditions_are_not_compared_with_the_benchmark() -> None:
    for other in ({"lookahead": "5"}, {"traffic": "sampled"}):
        assert row(versions=[version(1, "champion", **other)]).recently == "2.00, greedy at lookahead 3"


def test_an_alarm_is_told_and_a_draft_without_champion_or_server_too() -> None:
    assert row(traffic=traffic([1.5], announced=(NOW,))).drift == "alarm on 2027-01-15"
    found = row(versions=[version(1)], decisions=[], runs=None)
    assert (found.serves, found.recently, found.drift) == ("none", "no traffic seen", "not watched")
    assert (found.last_run, found.next_run) == ("unknown", "unknown")


def test_all_drafts_take_one_request_for_each_flow() -> None:
    drafts = [f"draft-{number}" for number in range(50)]
    runs = [run(StateType.SCHEDULED, NOW + day * DAY, draft=draft) for day in (2, 1) for draft in drafts]
    runs += [run(StateType.COMPLETED, NOW - DAY, f"{draft}-1", draft) for draft in drafts]
    client = AnsweringClient(runs)
    found = runs_of(client, drafts)  # pyright: ignore[reportArgumentType]
    assert client.requests == len(FLOWS) + 1
    assert [*found] == drafts
    for draft in drafts:
        planned, last = found[draft]["retrain"]
        assert planned.expected_start_time == datetime.fromtimestamp(NOW + DAY, UTC)
        assert last.name == f"{draft}-1"
        assert found[draft]["rollback"] == []


def test_a_busy_draft_hides_no_other() -> None:
    runs = [run(StateType.COMPLETED, NOW - number, draft="busy") for number in range(PAGE + 1)]
    runs.append(run(StateType.FAILED, NOW - 9 * DAY, "rare-1", "rare"))
    found = runs_of(AnsweringClient(runs), ["busy", "rare"])  # pyright: ignore[reportArgumentType]
    assert [one.name for one in found["rare"]["retrain"]] == ["rare-1"]
    assert len(found["busy"]["retrain"]) == 10


def test_the_page_escapes_what_it_shows() -> None:
    page = page_of([row(runs={"retrain": [run(StateType.FAILED, NOW, "<b>")]})])
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    assert "No draft is registered" in page_of([])


def test_hours_and_dollars_have_thousands() -> None:
    assert row(versions=[version(1, gpu_hours="1234.5", cost="12345.67")]).used == "1,234.5 GPU-hours, $12,345.67"


@pytest.mark.parametrize("status", [None, 401, 500])
def test_drafts_are_shown_without_their_runs_where_prefect_does_not_tell(
    status: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    tracked = start_run(tmp_path / "tracking.json", uri, "test", "run-1", {}, {})
    (tmp_path / "export").mkdir()
    register(uri, "draft-x", log_folder(tracked, tmp_path / "export", "draft", 1, "draft"), tracked.run_id, {})

    class Denying(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(status or 200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing."""

        do_GET = do_POST

    with ThreadingHTTPServer(("127.0.0.1", 0), Denying) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        if status is None:
            server.server_close()
        with temporary_settings({PREFECT_API_URL: (url := f"http://127.0.0.1:{server.server_port}/api")}):
            monkeypatch.setenv("PREFECT_API_URL", url)
            (found,) = read_drafts(uri)
        server.shutdown()
    assert (found.draft, found.last_run, found.next_run) == ("draft-x", "unknown", "unknown")
    said = capsys.readouterr().err
    assert said.startswith(f"Prefect at {url} does not tell of its runs (")
    assert said.count("\n") == 1
