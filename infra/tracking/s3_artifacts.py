"""MLflow's artifacts on S3, by the same client and credentials as everything else. Runs wherever MLflow does.

MLflow finds it by the entry point group `mlflow.artifact_repository`. Large files go in parts, and whatever fails is
sent again (both s3fs's doing). A file's SHA-256 travels with it and is compared when it is read.
"""

import posixpath
from pathlib import Path
from typing import Any

import fsspec
from mlflow.entities import FileInfo
from mlflow.store.artifact.artifact_repo import ArtifactRepository

from infra.files.atomic import sha256_file

HASH = "sha256"


class S3Artifacts(ArtifactRepository):
    """Artifacts below one `s3://` address."""

    def __init__(self, artifact_uri: str, tracking_uri: str | None = None, registry_uri: str | None = None) -> None:
        super().__init__(artifact_uri, tracking_uri, registry_uri)
        self._files = fsspec.filesystem("s3")
        self._root = artifact_uri.removeprefix("s3://").rstrip("/")

    def log_artifact(self, local_file: str, artifact_path: str | None = None) -> None:
        """Upload one file into the folder `artifact_path`."""
        destination = posixpath.join(self._at(artifact_path), Path(local_file).name)
        self._files.put_file(str(local_file), destination, Metadata={HASH: sha256_file(Path(local_file))})

    def log_artifacts(self, local_dir: str, artifact_path: str | None = None) -> None:
        """Upload a folder's files into the folder `artifact_path`."""
        for file in sorted(path for path in Path(local_dir).rglob("*") if path.is_file()):
            inside = file.parent.relative_to(local_dir).as_posix()
            self.log_artifact(str(file), posixpath.normpath(posixpath.join(artifact_path or "", inside)))

    def list_artifacts(self, path: str | None = None) -> list[FileInfo]:
        """The direct content of a folder; empty if `path` is a file."""
        at = self._at(path)
        self._files.invalidate_cache(at)
        if not self._files.isdir(at):
            return []
        found = [entry for entry in self._files.ls(at, detail=True) if entry["name"].rstrip("/") != at]
        infos = [self._info(entry) for entry in found]
        return sorted(infos, key=lambda info: str(info.path))

    def _info(self, entry: dict[str, Any]) -> FileInfo:
        folder = entry["type"] == "directory"
        path = posixpath.relpath(entry["name"], self._root)
        return FileInfo(path, folder, None if folder else entry["size"])

    def _download_file(self, remote_file_path: str, local_path: str) -> None:
        """Raises OSError for a file that is not what was sent."""
        source = self._at(remote_file_path)
        self._files.get_file(source, local_path)
        sent = self._files.metadata(source, refresh=True).get(HASH)
        if sent is not None and sent != sha256_file(Path(local_path)):
            raise OSError(f"s3://{source} is damaged: its SHA-256 is not the one that it was sent with")

    def delete_artifacts(self, artifact_path: str | None = None) -> None:
        """Remove a file or folder; removing what is not there is fine."""
        at = self._at(artifact_path)
        self._files.invalidate_cache(at)
        if self._files.exists(at):
            self._files.rm(at, recursive=True)

    def _at(self, path: str | None) -> str:
        if not path or path == ".":
            return self._root
        whole = posixpath.normpath(posixpath.join(self._root, path))
        if not whole.startswith(f"{self._root}/"):
            raise ValueError(f"artifact path {path!r} leads out of {self._root}")
        return whole
