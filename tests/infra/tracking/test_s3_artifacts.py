"""MLflow's artifacts on S3: as MLflow's own client would have it, and whole or not at all."""

from pathlib import Path

import fsspec
import pytest
from mlflow.exceptions import MlflowException
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from infra.tracking.s3_artifacts import S3Artifacts


@pytest.fixture
def artifacts(s3_bucket: str, tmp_path: Path) -> S3Artifacts:
    return S3Artifacts(f"{s3_bucket}/{tmp_path.name}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "export" / "deep").mkdir(parents=True)
    (tmp_path / "export" / "config.json").write_text("{}")
    (tmp_path / "export" / "deep" / "weights").write_bytes(bytes(1000))
    return tmp_path / "export"


def test_mlflow_takes_it_for_s3() -> None:
    assert isinstance(get_artifact_repository("s3://bucket/folder"), S3Artifacts)


def test_a_folder_goes_there_and_back(artifacts: S3Artifacts, folder: Path, tmp_path: Path) -> None:
    artifacts.log_artifacts(str(folder), "draft")
    assert [(info.path, info.is_dir, info.file_size) for info in artifacts.list_artifacts("draft")] == [
        ("draft/config.json", False, 2),
        ("draft/deep", True, None),
    ]
    assert [info.path for info in artifacts.list_artifacts()] == ["draft"]
    assert artifacts.list_artifacts("draft/config.json") == []
    (tmp_path / "back").mkdir()
    back = Path(artifacts.download_artifacts("draft", str(tmp_path / "back")))
    assert (back / "deep" / "weights").read_bytes() == bytes(1000)
    artifacts.delete_artifacts("draft")
    artifacts.delete_artifacts("draft")
    assert artifacts.list_artifacts() == []


def test_a_damaged_file_is_refused(artifacts: S3Artifacts, folder: Path, tmp_path: Path, s3_bucket: str) -> None:
    artifacts.log_artifact(str(folder / "config.json"))
    stored = f"{s3_bucket}/{tmp_path.name}/config.json"
    files = fsspec.filesystem("s3")
    files.pipe_file(stored, b"[]", Metadata=files.metadata(stored))
    with pytest.raises(MlflowException, match=r"config.json is damaged: its SHA-256"):
        artifacts.download_artifacts("config.json", str(tmp_path))


def test_nothing_leads_out_of_its_folder(artifacts: S3Artifacts, folder: Path) -> None:
    with pytest.raises(ValueError, match="leads out of"):
        artifacts.log_artifact(str(folder / "config.json"), "../../elsewhere")
