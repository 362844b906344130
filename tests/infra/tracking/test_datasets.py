"""What runs learn from and are measured on stays readable when the cache is gone, and goes when nobody names it."""

import json
import shutil
import time
from pathlib import Path

import mlflow
import mlflow.data
import pytest
from mlflow.entities import Run
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from infra.files.atomic import sha256_file
from infra.records.data_path import SamplesRecord
from infra.tracking import runs
from infra.tracking.client import connect, pages
from infra.tracking.datasets import (
    NEWEST_S,
    evaluation_set,
    log_samples,
    log_suites,
    remove_old_datasets,
)
from infra.tracking.runs import TrackedRun

DAY_S = 86_400
EXPERIMENT = "test-datasets"


@pytest.fixture(params=["file", "s3"])
def uri(tmp_path: Path, registry_uri: str, request: pytest.FixtureRequest) -> str:
    if request.param == "s3":
        bucket = request.getfixturevalue("s3_bucket")
        for name in (EXPERIMENT, "test"):
            connect(registry_uri).create_experiment(name, artifact_location=f"{bucket}/{tmp_path.name}/{name}")
    return registry_uri


def sample_set(cache: Path, content: str) -> SamplesRecord:
    folder = cache / content
    folder.mkdir(parents=True)
    (folder / "images").mkdir()
    for name in ("train.safetensors", "heldout.safetensors", "samples.json", "images/1"):
        (folder / name).write_bytes(f"{name} of {content}".encode())
    return SamplesRecord(
        path=str(folder), dataset_hash=content, template_hash="t", train_samples=9, heldout_samples=1,
        train_tokens=900, longest=100, supervised_share=1.0, dropped=0, truncated=0, unusable=0,
    )  # fmt: skip


def a_run(tmp_path: Path, uri: str, number: int) -> TrackedRun:
    tags = {"mlflow.source.name": f"draftsmith retrain test-{number}"}
    return runs.start_run(tmp_path / f"{number}.json", uri, "test", f"run-{number}", {}, tags)


def kept_runs(uri: str, name: str = EXPERIMENT) -> list[Run]:
    """What stands for the copies that are kept."""
    client = connect(uri)
    experiment = client.get_experiment_by_name(name)
    assert experiment
    return list(pages(client.search_runs, experiment_ids=[experiment.experiment_id]))


def kept(uri: str) -> set[str]:
    return {run.data.tags["draftsmith.dataset"] for run in kept_runs(uri)}


def named(uri: str, run: TrackedRun) -> dict[str, tuple[str, str, str]]:
    """Digest, context and address of a run's data sets by name."""
    found = connect(uri).get_run(run.run_id).inputs.dataset_inputs
    return {
        one.dataset.name: (one.dataset.digest, one.tags[0].value, json.loads(one.dataset.source)["uri"])
        for one in found
    }


def test_data_can_be_read_when_the_cache_is_gone(uri: str, tmp_path: Path) -> None:
    samples, run = sample_set(tmp_path / "cache", "c" * 64), a_run(tmp_path, uri, 1)
    assert evaluation_set(run) == (None, None)
    heldout = sha256_file(Path(samples.path) / "heldout.safetensors")
    log_samples(run, "python-docs", samples, most_mib=1, private=False)
    assert evaluation_set(run) == ("python-docs (held out)", heldout[:36])
    log_suites(run, [("gsm8k", "9" * 64, "gsm8k")])
    shutil.rmtree(tmp_path / "cache")
    found = named(uri, run)
    assert found["python-docs"][:2] == ("c" * 36, "training")
    assert found["python-docs (held out)"][:2] == (heldout[:36], "evaluation")
    assert found["gsm8k"] == ("9" * 36, "evaluation", "gsm8k")
    for name in ("train", "heldout"):
        address = found["python-docs" if name == "train" else "python-docs (held out)"][2]
        back = mlflow.artifacts.download_artifacts(artifact_uri=address, dst_path=str(tmp_path / "back"))
        assert Path(back).read_bytes() == f"{name}.safetensors of {'c' * 64}".encode()
    # Also by MLflow's own way from a run to its data.
    inputs = connect(uri).get_run(run.run_id).inputs.dataset_inputs
    (training,) = [one for one in inputs if one.dataset.name == "python-docs"]
    assert Path(mlflow.data.get_source(training).load()).read_bytes().startswith(b"train.safetensors of")


def test_content_is_kept_once_and_comes_back_to_its_place(uri: str, tmp_path: Path) -> None:
    """Also a copy that was interrupted before it was whole, or removed."""
    samples = sample_set(tmp_path / "cache", "c" * 64)
    first, second, third = (a_run(tmp_path, uri, number) for number in (1, 2, 3))
    log_samples(first, "docs", samples, most_mib=1, private=False)
    log_samples(second, "docs", samples, most_mib=1, private=False)
    assert len(kept_runs(uri)) == 1
    address = named(uri, first)["docs"][2]
    get_artifact_repository(address.removesuffix("/train.safetensors")).delete_artifacts()
    connect(uri).delete_run(kept_runs(uri)[0].info.run_id)
    log_samples(third, "docs", samples, most_mib=1, private=False)
    assert named(uri, third)["docs"][2] == address
    back = mlflow.artifacts.download_artifacts(artifact_uri=address, dst_path=str(tmp_path / "back"))
    assert Path(back).read_bytes().startswith(b"train.safetensors of")


def test_a_large_set_is_named_where_it_is(uri: str, tmp_path: Path) -> None:
    samples, run = sample_set(tmp_path / "cache", "c" * 64), a_run(tmp_path, uri, 1)
    log_samples(run, "docs", samples, most_mib=0, private=False)
    assert named(uri, run)["docs"][2] == f"{Path(samples.path).as_uri()}/train.safetensors"
    assert connect(uri).get_experiment_by_name(EXPERIMENT) is None or not kept(uri)


def test_what_nobody_names_goes_and_users_requests_after_their_time(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    public, private, unnamed = (sample_set(tmp_path / "cache", letter * 64) for letter in "abc")
    first, second = a_run(tmp_path, uri, 1), a_run(tmp_path, uri, 2)
    log_samples(first, "docs", public, most_mib=1, private=False)
    log_samples(first, "requests", private, most_mib=1, private=True)
    log_samples(second, "others", unnamed, most_mib=1, private=False)
    address = named(uri, second)["others"][2]
    connect(uri).delete_run(second.run_id)
    assert remove_old_datasets(uri, ["test"], private_days=60) == 0, "its run may be about to name it"
    now = time.time()
    monkeypatch.setattr("infra.tracking.datasets.time.time", lambda: now + NEWEST_S + 60)
    assert remove_old_datasets(uri, ["test"], private_days=60) == 1
    assert kept(uri) == {public.dataset_hash, private.dataset_hash}
    with pytest.raises(Exception, match=r"(?i)no such|not exist|not found|404"):
        mlflow.artifacts.download_artifacts(artifact_uri=address, dst_path=str(tmp_path / "back"))
    monkeypatch.setattr("infra.tracking.datasets.time.time", lambda: now + 60 * DAY_S + 60)
    assert remove_old_datasets(uri, ["test"], private_days=60) == 1
    assert kept(uri) == {public.dataset_hash}


def test_experiments_do_not_share_data_sets(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two teams, of which each may write its own experiment only."""
    samples = sample_set(tmp_path / "cache", "c" * 64)
    for experiment in ("test", "theirs"):
        tags = {"mlflow.source.name": f"draftsmith retrain {experiment}"}
        run = runs.start_run(tmp_path / f"{experiment}.json", uri, experiment, "run", {}, tags)
        log_samples(run, "docs", samples, most_mib=1, private=False)
    assert len(kept_runs(uri)) == len(kept_runs(uri, "theirs-datasets")) == 1
    now = time.time()
    monkeypatch.setattr("infra.tracking.datasets.time.time", lambda: now + NEWEST_S + 60)
    connect(uri).delete_run(run.run_id)
    assert remove_old_datasets(uri, ["test"], private_days=60) == 0
    assert remove_old_datasets(uri, ["theirs"], private_days=60) == 1
    assert kept(uri) == {samples.dataset_hash}
    # In one SQLite file all experiments have their artifacts in the same folder.
    address = named(uri, TrackedRun.read(tmp_path / "test.json"))["docs"][2]
    back = mlflow.artifacts.download_artifacts(artifact_uri=address, dst_path=str(tmp_path / "back"))
    assert Path(back).read_bytes().startswith(b"train.safetensors of")
    connect(uri).delete_run(TrackedRun.read(tmp_path / "test.json").run_id)
    assert remove_old_datasets(uri, ["test"], private_days=60) == 1
    with pytest.raises(Exception, match=r"(?i)no such|not exist|not found|404"):
        mlflow.artifacts.download_artifacts(artifact_uri=address, dst_path=str(tmp_path / "again"))


def test_an_empty_registry_has_nothing_to_remove(tmp_path: Path) -> None:
    assert remove_old_datasets(f"sqlite:///{tmp_path / 'mlflow.db'}", ["test"], private_days=60) == 0
