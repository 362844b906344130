"""The watch-traffic flow on a real Prefect server: quiet, an alarm, its event, and the retraining it starts."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import yaml
from prefect.settings import PREFECT_API_URL, temporary_settings

from infra.drift.config import RequestLogConfig, WatchConfig
from infra.drift.scrape import Counters
from infra.drift.store import TrafficStore
from infra.drift.traffic import Series, ServedSeries, TrafficRecord, TrafficWindow
from infra.files.atomic import sha256_file, write_atomically
from infra.records.acceptance import Conditions, RequestCounts
from infra.tracking import registry, runs
from infra.tracking.client import connect
from infra.tracking.promotion import DraftInService
from infra.tracking.runs import TrackedRun
from models.config.recipe import as_recipe, load_recipe
from models.data.conversations import read_documents
from tasks.events import FAILED, REPEATED, once_a_day, tell

ROOT = Path(__file__).parents[2]
UNKNOWN = "draftsmith.server.unknown_draft"
DRAFT, LOOKAHEAD, LENGTH = "draft-quickstart", 4, 2.4
SERVED = ServedSeries(version=1, lookahead=LOOKAHEAD, traffic="greedy")
METRICS = """\
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{{is_streaming="true"}} {0.generated}
# TYPE sglang:num_requests_total counter
sglang:num_requests_total{{is_streaming="true"}} {0.requests}
# TYPE sglang:spec_verify_calls_total counter
sglang:spec_verify_calls_total {0.steps}
# TYPE sglang:spec_num_steps gauge
sglang:spec_num_steps 4
# TYPE sglang:spec_num_draft_tokens gauge
sglang:spec_num_draft_tokens 5
"""


class Engine(ThreadingHTTPServer):
    """A serving engine's metrics and its draft; the test adds what was served."""

    def __init__(self, draft: str):
        super().__init__(("127.0.0.1", 0), Handler)
        self.info: dict[str, Any] = {"speculative_draft_model_path": draft}
        self.restart()

    def restart(self) -> None:
        self.info["startup_time"] = {"tokenizer_e2e": time.perf_counter()}
        self.counted = Counters()

    def serve_requests(self, requests: int, length: float) -> None:
        generated = round(requests * (1 + 10 * length))
        self.counted = self.counted.plus(Counters(generated=generated, requests=requests, steps=10 * requests))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        assert isinstance(self.server, Engine)
        self.send_response(200)
        self.end_headers()
        info = json.dumps(self.server.info)
        self.wfile.write((METRICS.format(self.server.counted) if self.path == "/metrics" else info).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Discard the access log."""


@contextmanager
def serving(draft: str) -> Iterator[Engine]:
    server = Engine(draft)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture
def engine() -> Iterator[Engine]:
    """Serves version 1."""
    with serving(f"/drafts/{DRAFT}/1") as server:
        yield server


@pytest.fixture
def second() -> Iterator[Engine]:
    """Serves version 1 too, to nobody."""
    with serving(f"/drafts/{DRAFT}-v1") as server:
        yield server


@pytest.fixture
def stranger() -> Iterator[Engine]:
    """Serves a draft that nobody registered."""
    with serving("/drafts/another") as server:
        yield server


def counts() -> RequestCounts:
    """A benchmark of 200 conversations of ten steps."""
    rows = tuple((round(10 * LENGTH) + index % 7 - 3, 10) for index in range(200))
    blank = dict.fromkeys((name for name, field in Conditions.model_fields.items() if field.annotation is str), "x")
    numbers = dict.fromkeys((name for name, field in Conditions.model_fields.items() if field.annotation is int), 1)
    conditions = Conditions.model_validate(
        blank
        | numbers
        | {"lookahead": LOOKAHEAD, "thinking": False, "temperature": 0.0, "sampled_temperature": 1.0}
        | {"versions": {}}
    )
    return RequestCounts(conditions=conditions, greedy={LOOKAHEAD: rows}, sampled={LOOKAHEAD: rows})


@pytest.fixture
def champion(stack: Any, tmp_path: Path) -> str:
    """A champion in the stack's registry, with its benchmark's counts."""
    uri = f"sqlite:///{stack.runs}/mlflow.db"
    stack.runs.mkdir(exist_ok=True)
    runs.start_run(tmp_path / "tracking.json", uri, "test", "run-1", {}, {})
    run = TrackedRun.read(tmp_path / "tracking.json")
    export, file = tmp_path / "export", tmp_path / "request_counts.json"
    write_atomically(export / "model.safetensors", "weights")
    write_atomically(file, counts())
    connect(uri).log_artifact(run.run_id, str(file), registry.BENCHMARK)
    model = runs.log_folder(run, export, "draft", 1, "draft")
    draft = registry.register(uri, DRAFT, model, run.run_id, {registry.RUN: "run-1"})
    DraftInService(uri, DRAFT).promote(draft.version, by="tests", reason="")
    return uri


@pytest.fixture
def look(
    stack: Any, engine: Engine, second: Engine, stranger: Engine, champion: str, tmp_path: Path
) -> Callable[..., str]:
    """Runs the flow once, as a worker does; what it returned, or printed where it was refused with this message."""
    logs = tmp_path / "logs"
    lines = [{"messages": [{"role": "user", "content": f"What is {word}?"}]} for word in ("a list", "a set")]
    private = {"messages": [{"role": "user", "content": "Write to jo.doe@example.org"}]}
    write_atomically(logs / "one.jsonl", "".join(json.dumps(line) + "\n" for line in [*lines, private]))
    servers = (engine.url, second.url, stranger.url)
    config = WatchConfig(
        draft=DRAFT, servers=servers, tracking_uri=champion, requests=RequestLogConfig(folder=str(logs)),
        timeout_s=200,  # this process answers, and may wait for a core
    )  # fmt: skip
    code = "import sys; from flows.watch_traffic import watch_traffic; print(watch_traffic(sys.argv[1]))"
    code = code.replace("sys.argv[1]", "__import__('json').loads(sys.argv[1])")

    def run(refused: str = "") -> str:
        ended = subprocess.run(
            [sys.executable, "-c", code, config.model_dump_json()],
            env=stack.environment, cwd=ROOT, capture_output=True, text=True, timeout=480, check=False,
        )  # fmt: skip
        assert (ended.returncode == 0) == (not refused), ended.stdout + ended.stderr
        assert refused in ended.stderr
        return ended.stdout if refused else ended.stdout.splitlines()[-1]

    return run


def quiet_day() -> TrafficRecord:
    """Thirty windows as the benchmark has them."""
    windows = tuple(
        TrafficWindow(
            began=21_600.0 * index, ended=21_600.0 * (index + 1), tokens=7200 + 40 * (index % 3 - 1), steps=3000,
            requests=300,
        )
        for index in range(30)
    )  # fmt: skip
    return TrafficRecord(draft=DRAFT, series=(Series(served=SERVED, opened=0.0, windows=windows),))


def events(stack: Any, name: str = "draftsmith.draft.drifted") -> list[dict[str, Any]]:
    body = {"filter": {"event": {"name": [name]}}}
    return stack.post("events/filter", body)["events"]


def retrainings(stack: Any) -> list[dict[str, Any]]:
    """Other runs of the same stack start from nothing."""
    found = [run for run in stack.post("flow_runs/filter", {}) if "config" in run["parameters"]]
    return [run for run in found if run["parameters"]["config"].get("training", {}).get("start_from") == "champion"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_fall_starts_retraining_once(
    stack: Any,
    engine: Engine,
    second: Engine,
    stranger: Engine,
    look: Callable[..., str],
    tmp_path: Path,
    until: Callable[..., None],
):
    store = TrafficStore(str(stack.runs / "drift"))
    store.write(quiet_day())
    assert "no fall" in look()
    assert len(store.read(DRAFT).series[0].windows) == 30, "the first look only notes the counters"
    engine.serve_requests(300, LENGTH)
    assert "no fall" in look()
    stranger.serve_requests(300, 1.1)
    assert "nothing says which version" in look()
    (series,) = store.read(DRAFT).series
    assert len(series.windows) == 31, "what an unknown draft accepts is nobody's"
    engine.serve_requests(3000, 0.8 * LENGTH)  # as many as lower the whole day's mean
    assert "the test says that it has fallen" in look()
    assert store.read(DRAFT).series[0].newest_then == 1
    until(lambda: events(stack), "for the event")
    (event,) = events(stack)
    assert event["resource"]["prefect.resource.id"] == DRAFT
    payload = event["payload"]
    assert (payload["version"], payload["prompts"]) == (1, 2)
    assert sha256_file(Path(payload["dataset"])) == payload["dataset_sha256"]
    assert {document.text for document in read_documents(payload["dataset"])} == {"What is a list?", "What is a set?"}
    until(lambda: retrainings(stack), "for the retraining")
    (retraining,) = retrainings(stack)
    config = as_recipe(retraining["parameters"]["config"], "the retraining")
    overrides = [f"data.source={payload['dataset']}", "training.start_from=champion"]
    assert config == load_recipe(ROOT / "recipes/quickstart.yaml", overrides)

    engine.serve_requests(300, 0.8 * LENGTH)
    look()
    stranger.restart()
    for server in (engine, second):
        server.info["quantization"] = "fp8"
        server.restart()
    (tmp_path / "logs").rename(tmp_path / "away")
    pages = len(stack.post("artifacts/filter", {}))
    look(refused="has 0 request logs")
    assert len(stack.post("artifacts/filter", {})) > pages, "the page is written all the same"
    (tmp_path / "away").rename(tmp_path / "logs")
    # The event of the restart arrives after everything that the look before it may have emitted.
    until(lambda: len(events(stack, UNKNOWN)) == 2, "for the event of the restarted server")
    assert {event["payload"]["server"] for event in events(stack, UNKNOWN)} == {stranger.url}
    assert len(events(stack)) == 1
    assert len(retrainings(stack)) == 1
    shown = [one for one in stack.post("artifacts/filter", {}) if one["key"] == f"traffic-{DRAFT}"]
    assert "alarm" in max(shown, key=lambda artifact: artifact["created"])["data"]

    look()
    until(lambda: len(events(stack)) == 2, "for the event of the changed target")
    look()
    newest = max(events(stack), key=lambda event: event["occurred"])
    assert newest["payload"]["reason"] == "the target under version 1 has changed: quantization none -> fp8"
    assert newest["payload"]["prompts"] == 2
    until(lambda: len(retrainings(stack)) == 2, "for the retraining on the changed target")
    assert len(events(stack)) == 2


@pytest.mark.slow
def test_a_fault_that_lasts_is_told_once_a_day(
    stack: Any, monkeypatch: pytest.MonkeyPatch, until: Callable[..., None]
) -> None:
    """Also when Prefect's triggers have forgotten the event's id, after half an hour."""
    told = list[str]()
    monkeypatch.setattr("tasks.events.emit_event", lambda _event, _resource, *, payload, id: told.append(str(id)))
    monkeypatch.setenv("PREFECT_API_URL", stack.environment["PREFECT_API_URL"])
    old, recent, other = (str(once_a_day(draft, "watch-traffic")) for draft in "abc")
    ages = {old: 2 * REPEATED, recent: timedelta()}
    happened = {id: {"id": id, "occurred": (datetime.now(UTC) - age).isoformat()} for id, age in ages.items()}
    kind = {"event": FAILED, "resource": {"prefect.resource.id": "x"}}
    stack.post("events", [kind | one for one in happened.values()])
    until(lambda: {one["id"] for one in events(stack, FAILED)} >= happened.keys(), "for the events to be kept")
    with temporary_settings({PREFECT_API_URL: stack.environment["PREFECT_API_URL"]}):
        for event_id in (old, recent, other):
            tell(FAILED, "x", event_id=UUID(event_id))
    assert told == [recent, other]
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:1/api"}):
        tell(FAILED, "x", event_id=UUID(old))
    assert told[-1] == old, "twice is better than never"


def test_the_deployment_watches_what_the_trigger_expects() -> None:
    deployments = {one["name"]: one for one in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]}
    config = WatchConfig.model_validate(deployments["watch-traffic"]["parameters"]["config"])
    (trigger,) = deployments["retrain"]["triggers"]
    assert trigger["match"]["prefect.resource.id"] == config.draft
    assert config.requests is None
    assert all(schedule["active"] is False for schedule in deployments["watch-traffic"]["schedules"])
