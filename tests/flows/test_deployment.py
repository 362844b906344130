"""The deployment of prefect.yaml under a real Prefect server and worker: run, cancelled, killed, and gone on with."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from mlflow import MlflowClient

from infra.ledger.ledger import Ledger
from infra.records import RegeneratedRecord, TargetRecord
from infra.run_folder import RunFolder
from infra.tracking.runs import TrackedRun
from models.config import RunConfig, load_recipe

ROOT = Path(__file__).parents[2]
STEPS, SAMPLES_PER_STEP = 160, 4
SMALL = [
    f"training.max_steps={STEPS}",
    f"training.samples_per_step={SAMPLES_PER_STEP}",
    "training.checkpoint_steps=10",
    "training.log_steps=5",
    "benchmark.prompts=8",
    "benchmark.max_new_tokens=16",
    "benchmark.reference_tokens=64",
    "benchmark.timed_tokens=16",
]


@pytest.mark.parametrize(("name", "overrides"), [("retrain", []), ("regenerate", ["data.regeneration={}"])])
def test_the_deployments_carry_the_quickstart_recipe(name: str, overrides: list[str]) -> None:
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    (found,) = (deployment for deployment in deployments if deployment["name"] == name)
    recipe = load_recipe(ROOT / "recipes/quickstart.yaml", overrides)
    assert RunConfig.model_validate(found["parameters"]["config"]) == recipe


@pytest.fixture
def submit(stack: Any) -> Callable[..., str]:
    """Submits a deployment with the tiny recipe and returns the flow run's id."""

    def create(name: str, run: str, *overrides: str) -> str:
        config = load_recipe(ROOT / "recipes" / "tiny.yaml", list(overrides)).model_dump(mode="json")
        deployed = stack.get(f"deployments/name/{name}/{name}")
        body = {"parameters": {"config": config, "run": run}}
        return stack.post(f"deployments/{deployed['id']}/create_flow_run", body)["id"]

    return create


def processes_of(folder: RunFolder) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if str(folder.path) in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue
    return found


def named(folder: RunFolder, module: str) -> psutil.Process:
    return next(p for p in processes_of(folder) if module in p.cmdline() and "--grace" not in p.cmdline())


def trained(folder: RunFolder, more_than: int) -> bool:
    if not folder.ledger_file.exists():
        return False
    with Ledger.open(folder.ledger_url, folder.name) as ledger:
        return ledger.progress().consumed > more_than


def flow_process(stack: Any) -> psutil.Process:
    """The flow run's process: the engine that a worker of this server started."""
    for process in psutil.process_iter():
        try:
            engine = any("prefect" in part and "engine" in part for part in process.cmdline())
            if engine and process.environ().get("PREFECT_API_URL") == stack.api:
                return process
        except psutil.Error:
            continue
    raise AssertionError("no flow of this server is running")


def mlflow_status(folder: RunFolder) -> str:
    tracking = TrackedRun.read(folder.path / "tracking.json")
    return MlflowClient(tracking.uri).get_run(tracking.run_id).info.status


def test_a_recipe_that_is_none_is_refused_by_the_server(stack: Any) -> None:
    deployed = stack.get("deployments/name/retrain/retrain")
    assert [schedule["active"] for schedule in deployed["schedules"]] == [False]
    assert "RunConfig" in deployed["parameter_openapi_schema"]["definitions"]
    with pytest.raises(Exception, match="409"):
        stack.post(f"deployments/{deployed['id']}/create_flow_run", {"parameters": {"config": {}}})


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_cancelled_killed_retried_and_finished(
    stack: Any, submit: Callable[..., str], until: Callable[..., None], tiny_target: TargetRecord
) -> None:
    folder = RunFolder(stack.runs / "deployed")
    with stack.worker() as worker:
        cancelled = submit("retrain", "deployed", *SMALL)
        until(lambda: trained(folder, 0), "for a checkpoint")
        stack.post(f"flow_runs/{cancelled}/set_state", {"state": {"type": "CANCELLING", "name": "Cancelling"}})
        assert stack.wait_for(cancelled)["state"]["type"] == "CANCELLED", stack.log()
        assert processes_of(folder) == []
        assert list(stack.memory.iterdir()) == []
        assert mlflow_status(folder) == "KILLED"

        # Generator and rank die, and the flow goes on; then it dies itself.
        second = submit("retrain", "deployed", *SMALL)
        until(
            lambda: folder.path.joinpath("logs/trainer.log").read_text().count("trainer ready") > 1, "for the trainer"
        )
        named(folder, "models.capture.generator").kill()
        named(folder, "models.training.trainer").kill()
        until(lambda: trained(folder, STEPS * SAMPLES_PER_STEP // 2), "for half of the samples")
        flow_process(stack).kill()
        assert stack.wait_for(second)["state"]["type"] == "CRASHED", stack.log()
        until(lambda: processes_of(folder) == [], "for the data plane's end")
        assert list(stack.memory.iterdir()) == []

        # What "Retry" in the UI does; then the worker dies with the flow.
        stack.post(
            f"flow_runs/{second}/set_state", {"state": {"type": "SCHEDULED", "name": "AwaitingRetry"}, "force": True}
        )
        until(lambda: processes_of(folder), "for the retry")
        flow = flow_process(stack)
        os.killpg(worker.pid, signal.SIGKILL)
        flow.kill()
        until(lambda: processes_of(folder) == [], "for the data plane's end")
    with stack.worker():
        last = submit("retrain", "deployed", *SMALL)
        found = stack.wait_for(last)
        assert found["state"]["type"] == "COMPLETED", found["state"]["message"] + stack.log()
    report = json.loads(folder.report.read_text())
    assert report["samples"]["consumed"] == STEPS * SAMPLES_PER_STEP
    steps = [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()]
    assert steps == list(range(5, STEPS + 1, 5))
    assert processes_of(folder) == []
    assert list(stack.memory.iterdir()) == []
    assert mlflow_status(folder) == "FINISHED"
    keys = {artifact["key"] for artifact in stack.post("artifacts/filter", {})}
    assert {"acceptance-length", "report"} <= keys


@pytest.mark.slow
@pytest.mark.timeout(600)
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
