"""Files of a source: local files and folders, fsspec addresses, and datasets of the Hub."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from botocore.exceptions import BotoCoreError, ClientError

from infra.files.atomic import sha256_file
from infra.files.cached_folder import build_once
from infra.refusal import Refusal
from infra.settings import cache_folder, expanded
from models.data import hub

KINDS = (".parquet", ".jsonl", ".json", ".txt")
"""Of a folder only files of the first kind that it contains are read; the others usually describe them."""
FAULTS = (OSError, ValueError, TypeError, RuntimeError, ImportError, BotoCoreError, ClientError)
"""Raised by fsspec's file systems for unreadable addresses."""


@dataclass(frozen=True)
class SourceFile:
    """A file on this machine, and its name in messages."""

    path: Path
    place: str


@dataclass(frozen=True)
class ResolvedSource:
    """The files of a recipe's source."""

    files: tuple[SourceFile, ...]
    hash: str
    """Hash of the content; of a dataset of the Hub, hash of its commit and file names."""
    revision: str | None = None
    """The commit of a dataset of the Hub."""


def find_source(source: str) -> ResolvedSource:
    """The files of `source`, downloaded if necessary. Raises Refusal if there are none of a known kind."""
    if source.startswith(hub.SCHEME):
        return _on_the_hub(source)
    if "://" in source:
        return _at_address(source)
    path = expanded("data.source", source)
    try:
        return _on_disk(source, path)
    except OSError as error:
        raise Refusal(
            f"data.source {source!r}: {error.filename} cannot be read ({error.strerror}): check its permissions"
        ) from error


def _on_disk(source: str, path: Path) -> ResolvedSource:
    if path.is_dir():
        below = (file.relative_to(path) for file in path.rglob("*") if file.is_file())
        names = one_kind(name.as_posix() for name in below if not any(part.startswith(".") for part in name.parts))
        _check_any(source, names)
        files = tuple(SourceFile(path / name, str(path / name)) for name in names)
        return ResolvedSource(files, _hash((name, sha256_file(path / name)) for name in names))
    if path.suffix not in KINDS:
        raise Refusal(
            f"data.source {source!r} is of no known kind: use a .jsonl, .json or .parquet file of conversations, a "
            ".txt file with blank lines between documents, a folder of them, hf://datasets/OWNER/NAME or 'python-docs'"
        )
    if not path.is_file():
        raise Refusal(f"data.source {source!r}: there is no such file (looked in {Path.cwd()}): check the path")
    content = hashlib.sha256(f"{path.suffix} {sha256_file(path)}".encode()).hexdigest()
    return ResolvedSource((SourceFile(path, str(path)),), content)


def one_kind(names: Iterable[str]) -> list[str]:
    """The sorted names of the first kind that occurs among them."""
    ordered = sorted(names)
    by_kind = ([name for name in ordered if name.endswith(kind)] for kind in KINDS)
    return next((chosen for chosen in by_kind if chosen), [])


def _on_the_hub(source: str) -> ResolvedSource:
    wanted = hub.parse(source)
    folder, names = hub.fetch(wanted, one_kind)
    _check_any(source, names)
    files = tuple(SourceFile(folder / name, f"{source}: {name}") for name in names)
    return ResolvedSource(files, _hash([wanted.repository, folder.name, *names]), folder.name)


def _at_address(url: str) -> ResolvedSource:
    """Cached copies of the files at an fsspec address such as s3://, copied again when they change."""
    single = Path(url).suffix in KINDS
    try:
        files, root = fsspec.core.url_to_fs(url)
        files.invalidate_cache()
        versions = {Path(root).name: str(files.ukey(root))} if single else _versions(files, root)
    except Refusal:
        raise
    except FAULTS as error:
        raise Refusal(
            f"data.source {url!r} cannot be read ({error or type(error).__name__}): check address and credentials "
            "(AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY)"
        ) from error
    _check_any(url, versions)
    folder = cache_folder() / "sources" / _hash([url, sorted(versions.items())])[:32]

    def copy(aside: Path) -> None:
        for name in versions:
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                files.get_file(root if single else f"{root}/{name}", str(aside / name))
            except FAULTS as error:
                raise Refusal(f"data.source {url!r}: {name} cannot be copied ({error}): try again") from error

    build_once(folder, copy)
    places = {name: url if single else f"{url.rstrip('/')}/{name}" for name in sorted(versions)}
    copies = tuple(SourceFile(folder / name, place) for name, place in places.items())
    return ResolvedSource(copies, _hash((file.path.suffix, sha256_file(file.path)) for file in copies))


def _versions(files: Any, root: str) -> dict[str, str]:
    """Names below `root`, each with a text that changes when the file does."""
    listed: dict[str, dict[str, Any]] = files.find(root, detail=True)
    below = {path.removeprefix(root).lstrip("/"): str(sorted(info.items(), key=str)) for path, info in listed.items()}
    chosen = one_kind(below)
    for name in chosen:
        _check_inside(root, name)
    return {name: below[name] for name in chosen}


def _check_inside(root: str, name: str) -> None:
    """Object stores allow any name; a file copied under a name with `..` would leave the cache."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name or any(len(p.encode()) > 255 for p in path.parts):
        raise Refusal(f"data.source: {root} holds the object {name!r:.200}, whose name is no path below it: rename it")


def _check_any(source: str, names: Iterable[str]) -> None:
    if not list(names):
        raise Refusal(
            f"data.source {source!r} holds no file of a known kind ({', '.join(KINDS)}): check the address, or convert "
            "the files"
        )


def _hash(parts: Iterable[object]) -> str:
    return hashlib.sha256(repr(list(parts)).encode()).hexdigest()
