"""MLflow's artifacts on S3, by MLflow's own client, with the variables that everything else reads."""

from pathlib import Path

import fsspec
import pytest
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from infra.tracking.client import connect, experiment_id


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "export" / "deep").mkdir(parents=True)
    (tmp_path / "export" / "config.json").write_text("{}")
    (tmp_path / "export" / "deep" / "weights").write_bytes(bytes(1000))
    return tmp_path / "export"


def test_a_folder_goes_there_and_back(s3_bucket: str, folder: Path, tmp_path: Path) -> None:
    """`AWS_ENDPOINT_URL` is enough: MLflow's own `MLFLOW_S3_ENDPOINT_URL` is not needed."""
    artifacts = get_artifact_repository(f"{s3_bucket}/{tmp_path.name}")
    artifacts.log_artifacts(str(folder), "draft")
    (tmp_path / "back").mkdir()
    back = Path(artifacts.download_artifacts("draft", str(tmp_path / "back")))
    assert (back / "deep" / "weights").read_bytes() == bytes(1000)
    artifacts.delete_artifacts("draft")
    assert artifacts.list_artifacts() == []


def test_an_operator_s_upload_arguments_hold(
    s3_bucket: str, folder: Path, tmp_path: Path, registry_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encryption with a key of the operator's, as many buckets demand it."""
    monkeypatch.setenv("MLFLOW_S3_UPLOAD_EXTRA_ARGS", '{"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "ours"}')
    client = connect(registry_uri)
    experiment = client.create_experiment("encrypted", artifact_location=f"{s3_bucket}/{tmp_path.name}")
    assert experiment_id(client, "encrypted") == experiment
    run = client.create_run(experiment)
    client.log_artifact(run.info.run_id, str(folder / "config.json"))
    stored = run.info.artifact_uri.removeprefix("s3://") + "/config.json"
    files = fsspec.filesystem("s3")
    bucket, _, name = stored.partition("/")
    head = files.call_s3("head_object", Bucket=bucket, Key=name)
    assert head["ServerSideEncryption"] == "aws:kms"
    assert head["SSEKMSKeyId"].endswith("ours")
