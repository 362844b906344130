"""Files of a source: local files and folders, fsspec addresses, and datasets of the Hub."""

import hashlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import fsspec
from botocore.exceptions import BotoCoreError, ClientError

from infra.drift.store import is_prompt_sample
from infra.files.atomic import sha256_file
from infra.files.cached_folder import build_once
from infra.files.private import mark_of
from infra.refusal import Refusal
from infra.settings import cache_folder, expanded
from models.data import hub
from models.data.kinds import FileKind, Selection, file_kind, known_kinds, select_files

FAULTS = (OSError, ValueError, TypeError, RuntimeError, ImportError, BotoCoreError, ClientError)
"""Raised by fsspec's file systems for unreadable addresses."""


@dataclass(frozen=True)
class SourceFile:
    """A file on this machine, and its name in messages."""

    path: Path
    place: str

    @property
    def kind(self) -> FileKind:
        kind = file_kind(self.path.name)
        assert kind is not None, f"{self.path} was chosen for its kind"
        return kind


@dataclass(frozen=True)
class ResolvedSource:
    """The files of a recipe's source."""

    files: tuple[SourceFile, ...]
    hash: str
    """Hash of the content; of a dataset of the Hub, hash of its commit and file names."""
    revision: str | None = None
    """The commit of a dataset of the Hub."""
    selection: Selection | None = None
    """What of a folder or dataset is read; None for a single file."""


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


def private_since(source: str) -> float | None:
    """When the prompts of users that a source holds were sampled (seconds since 1970); None for any other source.

    A source holds them if it is a sample of request logs, or text that the target generated to one.
    """
    if is_prompt_sample(source):
        try:
            files, path = fsspec.core.url_to_fs(source)
            return float(files.modified(path).timestamp())
        except FAULTS:  # removed since, or of a file system that does not say
            return time.time()
    if "://" not in source and (path := expanded("data.source", source)).is_file() and mark_of(path).is_file():
        return mark_of(path).stat().st_mtime
    return None


def _on_disk(source: str, path: Path) -> ResolvedSource:
    if path.is_dir():
        selection = select_files(_files_below(path))
        _check_any(source, selection.names)
        files = tuple(SourceFile(path / name, str(path / name)) for name in selection.names)
        content = _hash((name, sha256_file(path / name)) for name in selection.names)
        return ResolvedSource(files, content, selection=selection)
    kind = file_kind(path.name)
    if kind is None:
        raise Refusal(
            f"data.source {source!r} is of no known kind: use a .jsonl, .json or .parquet file of conversations, a "
            f".txt file with blank lines between documents (the kinds are {known_kinds()}), a folder of them, "
            "hf://datasets/OWNER/NAME or 'python-docs'"
        )
    if not path.is_file():
        raise Refusal(f"data.source {source!r}: there is no such file (looked in {Path.cwd()}): check the path")
    content = hashlib.sha256(f"{''.join(kind)} {sha256_file(path)}".encode()).hexdigest()
    return ResolvedSource((SourceFile(path, str(path)),), content)


def _files_below(root: Path) -> Iterator[str]:
    """Names of all files below `root`, also in linked folders, of which each is entered once.

    Raises OSError for a folder that cannot be read.
    """

    def fail(error: OSError) -> None:
        raise error

    entered = set[tuple[int, int]]()
    for folder, folders, files in os.walk(root, onerror=fail, followlinks=True):
        entry = os.stat(folder)
        if (entry.st_dev, entry.st_ino) in entered:  # a link to a folder above it, or a second one to the same folder
            folders.clear()
            continue
        entered.add((entry.st_dev, entry.st_ino))
        # Sorted, so that the same one of several links is entered everywhere; hidden ones are never read.
        folders[:] = sorted(name for name in folders if not name.startswith((".", "_")))
        for name in files:
            path = Path(folder, name)
            if path.is_file() or not path.exists():  # a broken link is refused when it is read, not passed over
                yield path.relative_to(root).as_posix()


def _on_the_hub(source: str) -> ResolvedSource:
    wanted = hub.parse(source)
    depth = len(PurePosixPath(wanted.path or "CONFIG/SPLIT").parts)
    selection = Selection()

    def choose(names: Iterable[str]) -> list[str]:
        nonlocal selection
        selection = select_files(names, depth)
        return list(selection.names)

    folder, names = hub.fetch(wanted, choose)
    _check_any(source, names)
    files = tuple(SourceFile(folder / name, f"{source}: {name}") for name in names)
    return ResolvedSource(files, _hash([wanted.repository, folder.name, *names]), folder.name, selection)


def _at_address(url: str) -> ResolvedSource:
    """Cached copies of the files at an fsspec address such as s3://, copied again when they change."""
    selection = None
    try:
        files, root = fsspec.core.url_to_fs(url)
        files.invalidate_cache()
        if _is_single(files, url, root):
            versions = {_path_part(root).name: str(files.ukey(root))}
        else:
            selection, versions = _versions(files, root)
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
                files.get_file(root if selection is None else f"{root}/{name}", str(aside / name))
            except FAULTS as error:
                raise Refusal(f"data.source {url!r}: {name} cannot be copied ({error}): try again") from error

    build_once(folder, copy, private_since=private_since(url))
    places = {name: url if selection is None else f"{url.rstrip('/')}/{name}" for name in sorted(versions)}
    copies = tuple(SourceFile(folder / name, place) for name, place in places.items())
    content = _hash(("".join(file.kind), sha256_file(file.path)) for file in copies)
    return ResolvedSource(copies, content, selection=selection)


def _is_single(files: Any, url: str, root: str) -> bool:
    """Whether the address is that of one file. Spark and Dask write folders that are named like files."""
    if url.endswith("/") or file_kind(_path_part(root).name) is None:
        return False
    # Asked in this order: over HTTP every address is a file, and `isdir` would download it.
    return files.isfile(root) or not files.isdir(root)


def _path_part(root: str) -> PurePosixPath:
    """The path of an address, without the query that follows it over HTTP."""
    return PurePosixPath(urlsplit(root).path if root.startswith(("http://", "https://")) else root)


def _versions(files: Any, root: str) -> tuple[Selection, dict[str, str]]:
    """The files below `root`, and the name of each that is read with a text that changes when the file does."""
    listed: dict[str, dict[str, Any]] = files.find(root, detail=True)
    below = {path.removeprefix(root).lstrip("/"): str(sorted(info.items(), key=str)) for path, info in listed.items()}
    selection = select_files(below)
    for name in selection.names:
        _check_inside(root, name)
    return selection, {name: below[name] for name in selection.names}


def _check_inside(root: str, name: str) -> None:
    """Object stores allow any name; a file copied under a name with `..` would leave the cache."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name or any(len(p.encode()) > 255 for p in path.parts):
        raise Refusal(f"data.source: {root} holds the object {name!r:.200}, whose name is no path below it: rename it")


def _check_any(source: str, names: Iterable[str]) -> None:
    if not list(names):
        raise Refusal(
            f"data.source {source!r} holds no file of a known kind ({known_kinds()}): check the address, or convert "
            "the files"
        )


def _hash(parts: Iterable[object]) -> str:
    return hashlib.sha256(repr(list(parts)).encode()).hexdigest()
