"""Where training text lies: files and folders here, at addresses that fsspec knows, and datasets of the Hub.

Used by the processes that regenerate text and prepare samples.
"""

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
from infra.settings import cache_folder
from models.data import hub

KINDS = (".parquet", ".jsonl", ".json", ".txt")
"""Of a folder, the files of the first kind that it holds are read: others beside them describe them."""


FAULTS = (OSError, ValueError, TypeError, RuntimeError, ImportError, BotoCoreError, ClientError)
"""What fsspec's file systems raise for an address that they cannot read."""


@dataclass(frozen=True)
class SourceFile:
    """A file on this machine, and what people call it."""

    path: Path
    place: str


@dataclass(frozen=True)
class ResolvedSource:
    """What a recipe's source came to."""

    files: tuple[SourceFile, ...]
    hash: str
    """Follows the content; for a dataset of the Hub, its commit and the names of its files."""
    revision: str | None = None
    """The commit of a dataset of the Hub."""


def find_source(source: str) -> ResolvedSource:
    """The files of `source`, on this machine. Raises Refusal for what is not there or of no known kind."""
    if source.startswith(hub.SCHEME):
        return _on_the_hub(source)
    if "://" in source:
        return _at_address(source)
    try:
        path = Path(source).expanduser()
    except RuntimeError as error:
        raise Refusal(f"data.source {source!r}: {error}: write the folder's whole path") from error
    if path.is_dir():
        names = one_kind(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
        _check_any(source, names)
        files = tuple(SourceFile(path / name, str(path / name)) for name in names)
        return ResolvedSource(files, _hash((name, sha256_file(path / name)) for name in names))
    _check_kind(source, path)
    if not path.is_file():
        raise Refusal(f"data.source {source!r}: there is no such file (looked in {Path.cwd()}): check the path")
    content = hashlib.sha256(f"{path.suffix} {sha256_file(path)}".encode()).hexdigest()
    return ResolvedSource((SourceFile(path, str(path)),), content)


def one_kind(names: Iterable[str]) -> list[str]:
    """Those of the first kind that is among them, in order."""
    ordered = sorted(names)
    by_kind = ([name for name in ordered if name.endswith(kind)] for kind in KINDS)
    return next((found for found in by_kind if found), [])


def _on_the_hub(source: str) -> ResolvedSource:
    found = hub.fetch(source, one_kind)
    _check_any(source, found.names)
    files = tuple(SourceFile(found.folder / name, f"{source}: {name}") for name in found.names)
    return ResolvedSource(files, _hash([found.repository, found.revision, *found.names]), found.revision)


def _at_address(url: str) -> ResolvedSource:
    """Copies in the cache of what lies at an address that fsspec knows, s3:// for instance; new when that changes."""
    try:
        files, root = fsspec.core.url_to_fs(url)
        files.invalidate_cache()
        versions = _versions(files, root, single=Path(url).suffix in KINDS)
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
                files.get_file(f"{root}/{name}" if Path(url).suffix not in KINDS else root, str(aside / name))
            except FAULTS as error:
                raise Refusal(f"data.source {url!r}: {name} cannot be copied ({error}): try again") from error

    build_once(folder, copy)
    single = len(versions) == 1 and Path(url).suffix in KINDS
    found = tuple(
        SourceFile(folder / name, url if single else f"{url.rstrip('/')}/{name}") for name in sorted(versions)
    )
    return ResolvedSource(found, _hash((file.path.suffix, sha256_file(file.path)) for file in found))


def _versions(files: Any, root: str, *, single: bool) -> dict[str, str]:
    """Names below `root` and what says that a file has changed."""
    if single:
        return {Path(root).name: str(files.ukey(root))}
    found: dict[str, dict[str, Any]] = files.find(root, detail=True)
    below = {path.removeprefix(root).lstrip("/"): str(sorted(info.items(), key=str)) for path, info in found.items()}
    chosen = one_kind(below)
    for name in chosen:
        _check_inside(root, name)
    return {name: below[name] for name in chosen}


def _check_inside(root: str, name: str) -> None:
    """Object stores take any name; copied as a file, one with `..` would leave the cache."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name or any(len(p.encode()) > 255 for p in path.parts):
        raise Refusal(f"data.source: {root} holds the object {name!r:.200}, whose name is no path below it: rename it")


def _check_kind(source: str, path: Path) -> None:
    if path.suffix not in KINDS:
        raise Refusal(
            f"data.source {source!r} is of no known kind: use a .jsonl, .json or .parquet file of conversations, a "
            ".txt file with blank lines between documents, a folder of them, hf://datasets/OWNER/NAME or 'python-docs'"
        )


def _check_any(source: str, names: Iterable[str]) -> None:
    if not list(names):
        raise Refusal(
            f"data.source {source!r} holds no file of a known kind ({', '.join(KINDS)}): check the address, or convert "
            "the files"
        )


def _hash(parts: Iterable[object]) -> str:
    return hashlib.sha256(repr(list(parts)).encode()).hexdigest()
