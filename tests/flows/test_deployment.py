"""The deployment of prefect.yaml under a real Prefect server and worker: run, cancelled, killed and resumed."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from mlflow import MlflowClient
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolUpdate
from prefect.concurrency.asyncio import ConcurrencySlotAcquisitionError
from prefect.settings import PREFECT_API_URL, temporary_settings

from infra.files.atomic import write_atomically
from infra.files.run_folder import RunFolder
from infra.ledger.ledger import Ledger
from infra.processes.process import Owner
from infra.records.data_path import RegeneratedRecord, TargetRecord
from infra.run.recovery import ATTEMPTS, Recoveries, Recovery, newest_step
from infra.tracking.runs import TrackedRun
from models.config.recipe import as_recipe, load_recipe
from tasks.deployments import folder_of
from tasks.pools import occupy, only_training_of_its_draft
from tasks.run import OpenRun

ROOT = Path(__file__).parents[2]
ROLLBACK = "roll a draft back that serves badly"
FLOWS = 6
WAIT_S = 300.0
STEPS, SAMPLES_PER_STEP = 160, 4
SMALL = [
    "data.max_tokens=64",
    f"training.max_steps={STEPS}",
    f"training.samples_per_step={SAMPLES_PER_STEP}",
    "training.checkpoint_steps=10",
    "training.log_steps=5",
    "benchmark.prompts=8",
    "benchmark.max_new_tokens=16",
    "benchmark.reference_tokens=64",
    "benchmark.timed_tokens=16",
    "promotion.smoke_prompts=2",
]


@pytest.mark.parametrize(("name", "overrides"), [("retrain", []), ("regenerate", ["data.regeneration={}"])])
def test_the_deployments_carry_the_quickstart_recipe(name: str, overrides: list[str]) -> None:
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    (found,) = (deployment for deployment in deployments if deployment["name"] == name)
    recipe = load_recipe(ROOT / "recipes/quickstart.yaml", overrides)
    assert as_recipe(found["parameters"]["config"], "prefect.yaml") == recipe


@pytest.fixture
def submit(stack: Any) -> Callable[..., str]:
    """Submits a deployment with the tiny recipe and returns the flow run's id."""

    def create(name: str, run: str, *overrides: str) -> str:
        config = load_recipe(ROOT / "recipes" / "tiny.yaml", list(overrides))
        write_atomically(RunFolder(stack.runs / run).config, config)  # a name is that of a run to resume
        deployed = stack.get(f"deployments/name/{name}/{name}")
        body = {"parameters": {"config": config.model_dump(mode="json"), "run": run}}
        return stack.post(f"deployments/{deployed['id']}/create_flow_run", body)["id"]

    return create


def processes_of(folder: RunFolder, module: str = "") -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        if str(folder.path) in command and (not module or (module in command and "--grace" not in command)):
            found.append(process)
    return found


def named(folder: RunFolder, module: str) -> psutil.Process:
    return processes_of(folder, module)[0]


def trained(folder: RunFolder, more_than: int) -> bool:
    if not folder.ledger_file.exists():
        return False
    with Ledger.open(folder.ledger_url, folder.name) as ledger:
        return ledger.progress().consumed > more_than


def flow_process(flow_run: str) -> psutil.Process:
    """The flow run's process: the engine that a worker started."""
    for process in psutil.process_iter():
        try:
            engine = any("prefect" in part and "engine" in part for part in process.cmdline())
            if engine and process.environ().get("PREFECT__FLOW_RUN_ID") == flow_run:
                return process
        except psutil.Error:
            continue
    raise AssertionError(f"flow run {flow_run} is not running")


def mlflow_status(folder: RunFolder) -> str:
    tracking = TrackedRun.read(folder.path / "tracking.json")
    return MlflowClient(tracking.uri).get_run(tracking.run_id).info.status


def test_a_recipe_that_is_none_is_refused_by_the_server(stack: Any) -> None:
    deployed = stack.get("deployments/name/retrain/retrain")
    assert [schedule["active"] for schedule in deployed["schedules"]] == [False]
    assert "RunConfig" in deployed["parameter_openapi_schema"]["definitions"]
    with_password = load_recipe(ROOT / "recipes" / "tiny.yaml").model_dump(mode="json")
    with_password["ledger"]["url"] = "postgresql://me:secret@db/x"
    for config in ({}, with_password):
        with pytest.raises(Exception, match="409"):
            stack.post(f"deployments/{deployed['id']}/create_flow_run", {"parameters": {"config": config}})


def next_run(stack: Any, until: Callable[..., None], after: str) -> str:
    """The flow run that nobody submitted."""
    until(lambda: stack.flow_runs("retrain")[-1] != after, "for the run to go on")
    return stack.flow_runs("retrain")[-1]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_cancelled_killed_and_finished_without_a_person(
    stack: Any, submit: Callable[..., str], until: Callable[..., None], tiny_target: TargetRecord
) -> None:
    folder = RunFolder(stack.runs / "deployed")
    with stack.worker("draftsmith-recovery"):
        with stack.worker() as worker:
            cancelled = submit("retrain", "deployed", *SMALL)
            until(lambda: trained(folder, 0), "for a checkpoint")
            stack.post(f"flow_runs/{cancelled}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})
            assert stack.wait_for(cancelled)["state"]["type"] == "CANCELLED", stack.log()
            assert processes_of(folder) == []
            assert list(stack.memory.iterdir()) == []
            assert mlflow_status(folder) == "KILLED"

            # Generator and rank die, and the flow goes on; then it dies itself.
            first = submit("retrain", "deployed", *SMALL)
            trainer = folder.path / "logs/trainer.log"
            until(lambda: trainer.read_text().count("trainer ready") > 1, "for the trainer")
            named(folder, "models.capture.generator").kill()
            named(folder, "models.training.trainer").kill()
            until(lambda: trained(folder, STEPS * SAMPLES_PER_STEP // 3), "for a third of the samples")
            flow_process(first).kill()
            assert stack.wait_for(first)["state"]["type"] == "CRASHED", stack.log()

            # It goes on by itself; then worker and flow die together.
            second = next_run(stack, until, first)
            until(lambda: trained(folder, STEPS * SAMPLES_PER_STEP * 2 // 3), "for two thirds of the samples")
            flow = flow_process(second)
            os.killpg(worker.pid, signal.SIGKILL)
            flow.kill()
            until(lambda: processes_of(folder) == [], "for the data plane's end")
            assert list(stack.memory.iterdir()) == []
        with stack.worker():
            last = next_run(stack, until, second)
            found = stack.wait_for(last)
            assert found["state"]["type"] == "COMPLETED", found["state"]["message"] + stack.log()
            assert stack.get(f"flow_runs/{second}")["state"]["type"] == "CRASHED"
        assert_finished(stack, folder)
        assert_given_up(stack, folder, first)


def assert_finished(stack: Any, folder: RunFolder) -> None:
    report = json.loads(folder.report.read_text())
    assert report["samples"]["consumed"] == STEPS * SAMPLES_PER_STEP
    steps = [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()]
    assert steps == list(range(5, STEPS + 1, 5))
    assert processes_of(folder) == []
    assert list(stack.memory.iterdir()) == []
    assert mlflow_status(folder) == "FINISHED"
    keys = {artifact["key"] for artifact in stack.post("artifacts/filter", {})}
    assert "report-tiny" in keys


def assert_given_up(stack: Any, folder: RunFolder, crashed: str) -> None:
    """A run that came to no new checkpoint for so long is a person's."""
    made = tuple(Recovery(flow_run=f"earlier-{number}", step=newest_step(folder, None)) for number in range(ATTEMPTS))
    write_atomically(folder.path / "recoveries.json", Recoveries(made=made))
    deployed, before = stack.get("deployments/name/recover/recover"), stack.flow_runs("retrain")
    body = {"parameters": {"flow_run": f"prefect.flow-run.{crashed}"}}
    found = stack.wait_for(stack.post(f"deployments/{deployed['id']}/create_flow_run", body)["id"])
    assert found["state"]["type"] == "FAILED"
    assert "died 4 times without a new checkpoint" in found["state"]["message"]
    assert stack.flow_runs("retrain") == before


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_text_is_regenerated(stack: Any, submit: Callable[..., str], tiny_target: TargetRecord, tmp_path: Path) -> None:
    folder, source = RunFolder(stack.runs / "regenerated"), tmp_path / "prompts.txt"
    source.write_text("A list is a sequence of\n\nEvery module has a name that")
    settings = (f"data.source={source}", 'data.regeneration={"max_new_tokens": 8, "prompt_tokens": 6}')
    with stack.worker():
        found = stack.wait_for(submit("regenerate", "regenerated", *settings))
    assert found["state"]["type"] == "COMPLETED", found["state"]["message"] + stack.log()
    record = RegeneratedRecord.read(folder.regenerated)
    texts = [json.loads(line)["text"] for line in Path(record.path).read_text().splitlines()]
    assert len(texts) == 2
    assert sum(text.startswith("A list is") for text in texts) == 1
    assert processes_of(folder) == []


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_runs_share_no_gpu_and_wait_for_one(
    stack: Any, submit: Callable[..., str], until: Callable[..., None], tiny_target: TargetRecord
) -> None:
    """Names of GPUs are enough for that: the processes that lease them compute on the CPU."""
    names = ["one", "two", "three"]
    settings = [*SMALL, "training.max_steps=60", "pools.inference_gpus=1"]
    held: set[tuple[tuple[str, str], ...]] = set()
    with stack.worker(DRAFTSMITH_GPUS="GPU-fake-a,GPU-fake-b"):
        # Of different drafts: trainings of one wait for each other.
        runs = [submit("retrain", name, *settings, f"tracking.registered_model=draft-{name}") for name in names]
        until(lambda: held.add(holders(stack, names)) or ended(stack, runs), "for three runs")
    assert [stack.get(f"flow_runs/{run}")["state"]["type"] for run in runs] == ["COMPLETED"] * 3, stack.log()
    assert all(len({gpu for _, gpu in at_once}) == len(at_once) for at_once in held), held
    assert max(map(len, held)) == 2, held
    assert {name for at_once in held for name, _ in at_once} == set(names)


def test_flows_that_create_a_limit_at_the_same_time_share_it(stack: Any) -> None:
    together = threading.Barrier(FLOWS)

    def enter(limit: str) -> None:
        with temporary_settings({PREFECT_API_URL: stack.api}):
            together.wait(WAIT_S)
            with occupy(limit, 1, FLOWS, WAIT_S):
                pass

    for round_ in range(5):
        with ThreadPoolExecutor(FLOWS) as threads:
            list(threads.map(enter, [f"shared-{round_}"] * FLOWS))


def test_only_one_run_trains_a_draft_at_a_time(stack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.pools.LEASE_S", 3600.0)  # it must not run out while this process gets no core

    def run(draft: str, wait_s: float = WAIT_S) -> OpenRun:
        settings = [f"tracking.registered_model={draft}", f"pools.wait_hours={wait_s / 3600}"]
        return OpenRun(load_recipe(ROOT / "recipes/tiny.yaml", settings), RunFolder(tmp_path), Owner("x", tmp_path))

    with temporary_settings({PREFECT_API_URL: stack.api}), only_training_of_its_draft(run("draft-a")):
        with only_training_of_its_draft(run("draft-b")):
            pass
        with pytest.raises((TimeoutError, ConcurrencySlotAcquisitionError)):
            with only_training_of_its_draft(run("draft-a", wait_s=1.0)):
                raise AssertionError("two runs train one draft")


def redeploy(stack: Any, folder: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tasks.deployments", str(folder)], cwd=ROOT, env=stack.environment | {"PWD": "/"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.slow
def test_what_the_operator_changed_survives_another_deployment(stack: Any, tmp_path: Path) -> None:
    redeploy(stack, tmp_path)
    with temporary_settings({PREFECT_API_URL: stack.api}), get_client(sync_client=True) as client:
        watch = client.read_deployment_by_name("watch-traffic/watch-traffic")
        nightly = client.read_deployment_by_name("benchmark-champion/benchmark-champion")
        client.update_deployment_schedule(watch.id, watch.schedules[0].id, active=True)
        client.update_deployment(nightly.id, DeploymentUpdate(concurrency_limit=3))
        client.pause_deployment(nightly.id)
        client.update_work_pool("draftsmith", WorkPoolUpdate(concurrency_limit=5))
        (rollback,) = client.read_automations_by_name(ROLLBACK)
        client.pause_automation(rollback.id)
    redeploy(stack, tmp_path)
    with temporary_settings({PREFECT_API_URL: stack.api}), get_client(sync_client=True) as client:
        watch = client.read_deployment_by_name("watch-traffic/watch-traffic")
        nightly = client.read_deployment_by_name("benchmark-champion/benchmark-champion")
        assert [(one.slug, one.active) for one in watch.schedules] == [("every-quarter-hour", True)]
        assert folder_of(watch) == str(ROOT), "not the shell's folder, which `make -C` leaves in $PWD"
        assert [(one.slug, one.active) for one in nightly.schedules] == [("nightly", False)]
        assert nightly.paused
        assert nightly.global_concurrency_limit.limit == 3
        assert client.read_work_pool("draftsmith").concurrency_limit == 5
        assert [one.enabled for one in client.read_automations_by_name(ROLLBACK)] == [False]
        (rollback,) = client.read_automations_by_name(ROLLBACK)
        client.resume_automation(rollback.id)  # other tests share the server
        client.resume_deployment(nightly.id)
        client.update_deployment_schedule(watch.id, watch.schedules[0].id, active=False)
        client.update_work_pool("draftsmith", WorkPoolUpdate(concurrency_limit=None))


def ended(stack: Any, runs: list[str]) -> bool:
    return all(stack.get(f"flow_runs/{run}")["state"]["type"] in {"COMPLETED", "FAILED", "CRASHED"} for run in runs)


def holders(stack: Any, names: list[str]) -> tuple[tuple[str, str], ...]:
    """Which runs' generators are bound to which GPU, now."""
    found = set()
    for name in names:
        for process in processes_of(RunFolder(stack.runs / name)):
            try:
                if "models.capture.generator" in process.cmdline() and "--grace" not in process.cmdline():
                    found.add((name, process.environ()["CUDA_VISIBLE_DEVICES"]))
            except psutil.Error:
                continue
    return tuple(sorted(found))
