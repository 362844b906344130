"""A year in fast motion: does everything that schedules leave behind stay bounded?

    python benchmarks/year.py [--weeks 52]

Every simulated week a draft is retrained, benchmarked nightly and watched every 15 minutes, and the real clean-up flow
runs; then a week passes for every file and row. Real are the ledger (one SQLite file for all runs, as a shared
PostgreSQL would be), MLflow with its registry (SQLite and files), the Prefect server with its vacuum service (SQLite),
run folders, cache, drift folder, and the code that writes and removes. Simulated are

- the work: a trainer that writes 100 KB per checkpoint and learns nothing,
- the watch's flow runs: one is executed, and its rows are copied 672 times a week,
- time: points in time are moved into the past; clean-up runs weekly in place of daily.

Result: sizes in bytes after every clean-up. Bounded means: in the last quarter no store is more than 5 % larger than
its largest size in the quarter before.
"""

import argparse
import json
import os
import sqlite3
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

PER_WEEK = 7 * 96
"""Flow runs of a watch every 15 minutes."""
SAMPLES = 200
CHECKPOINT_BYTES = 100_000
DRAFT = "draft-year"
BUSY_S = 120.0
VACUUM_S = 300.0
TOLERANCE = 1.05
SPAN = 13
RESULT = Path(__file__).parent / "results" / "year.json"


def retrain(week: int, ledger_url: str) -> None:
    """What a weekly retraining leaves: run folder, ledger rows, cached samples, MLflow run, checkpoints, version."""
    from infra.files.cached_folder import build_once
    from infra.files.run_folder import RunFolder
    from infra.ledger.ledger import Ledger
    from infra.records.data_path import SampleSlot
    from infra.settings import cache_folder, runs_folder, tracking_uri
    from infra.tracking import registry
    from infra.tracking.promotion import DraftInService
    from infra.tracking.retention import note_experiment
    from infra.tracking.runs import TrackedRun, end_run, log_checkpoint, log_folder, log_new_metrics, start_run

    folder = RunFolder(runs_folder() / f"year-{week:03d}")
    folder.logs.mkdir(parents=True)
    config = {"name": "year", "ledger": {"url": ledger_url}}
    folder.config.write_text(json.dumps(config))
    (folder.logs / "trainer.log").write_text("a line of a log\n" * 5_000)
    build_once(cache_folder() / "samples" / f"week-{week:03d}", lambda aside: _fill(aside / "tokens.safetensors"))
    prompts = runs_folder() / "drift" / DRAFT / f"prompts-{week:012d}.jsonl"
    prompts.parent.mkdir(parents=True, exist_ok=True)
    prompts.write_text('{"text": "a prompt"}\n' * 2_000)
    with Ledger.open(ledger_url, folder.name) as ledger:
        ledger.create_run(budget_bytes=10**6, bytes_per_token=1, lease_seconds=60, max_attempts=2, order="strict")
        ledger.open_epoch(None, 0, [SampleSlot(ordinal=i, sample=i, tokens=100) for i in range(SAMPLES)])
    uri = tracking_uri()
    tags = {"mlflow.source.name": f"draftsmith retrain {folder.name}"}
    record = folder.path / "tracking.json"
    note_experiment(runs_folder(), "draftsmith")
    run = start_run(record, uri, "draftsmith", folder.name, config, tags)
    lines = [{"step": step, "loss": 1.0, "acceptance_by_position": [0.5] * 4} for step in range(20, 801, 20)]
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    log_new_metrics(record, folder.metrics)
    for step in (400, 800):
        _fill(folder.checkpoints / f"step-{step:06d}" / "model.safetensors")
        log_checkpoint(TrackedRun.read(record), folder.checkpoints / f"step-{step:06d}", step, folder.metrics)
    _fill(folder.export / "model.safetensors")
    model_id = log_folder(run, folder.export, "draft", 800, "draft")
    draft = registry.register(uri, DRAFT, model_id, run.run_id, {registry.RUN: folder.name})
    if week % 3 == 0:
        DraftInService(uri, DRAFT).promote(draft.version, by="gate", reason="better")
    else:
        DraftInService(uri, DRAFT).refuse(draft.version, by="gate", reason="not better")
    folder.report.write_text("{}")
    end_run(run, "FINISHED")


def benchmark_nightly(week: int) -> None:
    """Seven nights: run folders that train nothing, and figures of the champion."""
    from infra.settings import runs_folder, tracking_uri
    from infra.tracking.registry import champion
    from infra.tracking.runs import log_model_figures

    draft = champion(tracking_uri(), DRAFT)
    assert draft
    for night in range(7):
        folder = runs_folder() / f"year-nightly-{week:03d}-{night}"
        (folder / "logs").mkdir(parents=True)
        (folder / "config.json").write_text('{"name": "nightly"}')
        (folder / "logs" / "benchmark.log").write_text("a line of a log\n" * 500)
        (folder / "benchmark.json").write_text("{}")
        log_model_figures(tracking_uri(), draft, {"nightly/acceptance_length": 2.0, "nightly/goodput": 100.0})


def watch(week: int) -> None:
    """672 looks at a server that runs the champion, each of which closes a window: the record, as the flow keeps it."""
    from infra.drift.config import WatchConfig
    from infra.drift.scrape import Counters, Reading, Scrape, ServedDraft
    from infra.drift.sequential import DriftTest, Reference
    from infra.drift.store import TrafficStore
    from infra.settings import runs_folder, tracking_uri
    from infra.tracking.registry import champion
    from tasks.drift import ENDED_WINDOWS

    draft = champion(tracking_uri(), DRAFT)
    assert draft
    config = WatchConfig(draft=DRAFT, servers=("http://server:30000",))
    test = DriftTest(Reference.of([(23, 10), (24, 10), (22, 10)] * 50), config.fall, config.average_run_length)
    store = TrafficStore(str(runs_folder() / "drift"))
    record, url = store.read(DRAFT), config.servers[0]
    for look in range(PER_WEEK):
        done = week * PER_WEEK + look + 1
        counters = Counters(generated=4700 * done, requests=100 * done, steps=2000 * done)
        served = ServedDraft(start="once", path=f"{DRAFT}/{draft.version}")
        seen = Scrape(readings={url: Reading(counters=counters, lookahead=4, draft_tokens=5, draft=served)})
        now = week * 7 * 86_400.0 + look * 900.0
        record = record.observe(seen, {url: draft.version}, "greedy", now, config.window_steps)
    live = [series.served for series in record.live("greedy")]
    for series in record.series:
        keep = config.keep_windows if series.served in live else ENDED_WINDOWS
        record = record.with_series(series.trimmed(keep, test))
    store.write(record)


def serve() -> None:
    """A week of access logs of the stack's servers: 1 KB for each watch."""
    from infra.settings import runs_folder

    log = runs_folder() / ".stack" / "logs" / "mlflow-server.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a") as file:
        file.write(("x" * 1023 + "\n") * PER_WEEK)


def _fill(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(os.urandom(CHECKPOINT_BYTES))


def run_template() -> str:
    """Execute a flow of the watch's shape (three tasks, logs, one artifact); the id of its run."""
    from prefect import flow, get_run_logger, task
    from prefect.artifacts import create_markdown_artifact

    @task
    def observe_traffic() -> None:
        get_run_logger().info("%d of %d verification steps for the next window", 1000, 2000)

    @task
    def judge_traffic() -> None:
        get_run_logger().info("no drift: acceptance length 2.31 in the last 10 windows, 2.30 in the benchmark")

    @task
    def show_traffic() -> None:
        create_markdown_artifact("| window | length |\n|---|---|\n" + "| 1 | 2.3 |\n" * 20, key="traffic-of-draft-year")

    @flow(name="watch-traffic")
    def watch_traffic() -> str:
        from prefect.runtime import flow_run

        observe_traffic()
        judge_traffic()
        show_traffic()
        return str(flow_run.id)

    return watch_traffic()


def wait_for_vacuum(database: Path) -> None:
    """Until Prefect's own service has removed what is older than its limits. Raises TimeoutError."""
    queries = {
        "flow runs": "SELECT count(*) FROM flow_run WHERE end_time < datetime('now', '-31 days')",
        "events": "SELECT count(*) FROM events WHERE occurred < datetime('now', '-8 days')",
    }
    deadline = time.monotonic() + VACUUM_S
    while True:
        with sqlite3.connect(database, timeout=BUSY_S) as connection:
            left = {what: connection.execute(query).fetchone()[0] for what, query in queries.items()}
        if not any(left.values()):
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"Prefect has not removed what is old within {VACUUM_S:g} s: {left}")
        time.sleep(0.5)


def sizes(world: Path) -> dict[str, int]:
    """Bytes of every store; a database with its write-ahead log left out, which is emptied at each checkpoint."""

    def total(*paths: Path) -> int:
        files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()]
        return sum(file.stat().st_size for file in files if not file.name.endswith(("-wal", "-shm")))

    runs = world / "runs"
    return {
        "ledger": total(world / "ledger.sqlite"),
        "mlflow database": total(runs / "mlflow.db"),
        "mlflow artifacts": total(runs / "mlflow-artifacts"),
        "prefect database": total(world / "prefect" / "prefect.db"),
        "run folders": total(*runs.glob("year-*")),
        "cache": total(world / "cache"),
        "drift": total(runs / "drift"),
        "stack logs": total(runs / ".stack"),
    }


def simulate(world: Path, weeks: int) -> list[dict[str, int]]:
    """Live `weeks` weeks in an empty folder; the sizes after each."""
    from prefect_history import copy_run, read_run
    from simulated_days import age_files, age_mlflow, age_prefect

    from flows.clean_up import clean_up

    prefect, ledger = world / "prefect" / "prefect.db", f"sqlite:///{world / 'ledger.sqlite'}"
    template = read_run(prefect, run_template())
    history: list[dict[str, int]] = []
    for week in range(weeks):
        begun = time.monotonic()
        retrain(week, ledger)
        benchmark_nightly(week)
        watch(week)
        serve()
        copy_run(prefect, template, PER_WEEK)
        for path in (world / "runs", world / "cache"):
            age_files(path, 7)
        age_mlflow(world / "runs" / "mlflow.db", 7)
        age_prefect(prefect, 7)
        clean_up()
        wait_for_vacuum(prefect)
        history.append(sizes(world))
        shown = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in history[-1].items())
        print(f"week {week + 1} of {weeks}, {time.monotonic() - begun:.0f} s; MiB: {shown}", flush=True)
    return history


def growth(history: list[dict[str, int]]) -> dict[str, float]:
    """Largest size in the last weeks, relative to the largest in the weeks before those."""
    last, before = history[-SPAN:], history[-2 * SPAN : -SPAN] or history[:1]
    return {name: max(one[name] for one in last) / max(1, *(one[name] for one in before)) for name in history[0]}


def environment(world: Path) -> Mapping[str, str]:
    """Everything that is written lies in `world`; Prefect's service looks every two seconds, not every hour."""
    return {
        "DRAFTSMITH_RUNS": str(world / "runs"),
        "DRAFTSMITH_CACHE": str(world / "cache"),
        "DRAFTSMITH_SHM": str(world / "shm"),
        "PREFECT_HOME": str(world / "prefect"),
        "PREFECT_SERVER_SERVICES_DB_VACUUM_LOOP_SECONDS": "2",
        "PREFECT_SERVER_SERVICES_DB_VACUUM_ORPHAN_CLEANUP_LOOP_SECONDS": "2",
    }


def live(world: Path, weeks: int) -> list[dict[str, int]]:
    """Start Prefect's server with the settings that Draftsmith gives it, and simulate."""
    for folder in ("runs", "cache", "shm", "prefect"):
        (world / folder).mkdir(parents=True)
    os.environ.update(environment(world))
    for name in ("MLFLOW_TRACKING_URI", "PREFECT_API_URL", "MLFLOW_BACKEND_STORE_URI"):
        os.environ.pop(name, None)
    from infra.servers.local import prefect_api

    with prefect_api():
        import prefect  # noqa: F401 (imported while the server starts)
    return simulate(world, weeks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weeks", type=int, default=52)
    parser.add_argument("--result", type=Path, default=RESULT)
    options = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="draftsmith-year-") as world:
        history = live(Path(world), options.weeks)
        from infra.files.atomic import write_atomically
        from infra.provenance import git_sha, hardware, versions

        grown = growth(history)
        result = {
            "commit": git_sha(),
            "date": datetime.now(UTC).date().isoformat(),
            "hardware": hardware(),
            "versions": versions(),
            "weeks": options.weeks,
            "minutes": round((time.monotonic() - begun) / 60, 1),
            "bounded": all(value <= TOLERANCE for value in grown.values()),
            "growth_in_the_last_weeks": {name: round(value, 3) for name, value in grown.items()},
            "bytes_by_week": history,
        }
        write_atomically(options.result, json.dumps(result, indent=1) + "\n")
        print(json.dumps({name: result[name] for name in ("bounded", "growth_in_the_last_weeks")}, indent=1))


if __name__ == "__main__":
    main()
