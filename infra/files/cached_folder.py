"""Folders that are built once and never seen half-built."""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from infra.files.atomic import sync_file, sync_folder
from infra.files.folders import make_folder
from infra.files.locks import LockHeldError, hold
from infra.files.private import keep_private
from infra.refusal import Refusal


def build_once(
    folder: Path, build: Callable[[Path], None], timeout_s: float = 1800.0, private_since: float | None = None
) -> bool:
    """Make `folder` by `build(aside)` unless it is there; return whether it was built now.

    The modification time of a folder that is there is renewed: clean-up removes what is unused
    (`infra.run.retention`).
    `build` fills a folder beside the final place, which is then made durable and renamed. Of several processes one
    builds and the others wait for it; what a dead process left aside is removed.
    `private_since`: it is made of prompts of users that were sampled then (`infra.files.private`).

    Raises:
        Refusal: another process has been building for longer than `timeout_s`, the folder above may not be created, or
            its file system has no locks.
    """
    if folder.is_dir():
        with suppress(OSError):  # a cache that somebody else filled, or a read-only one, is theirs to clean up
            os.utime(folder)
        return False
    make_folder(folder.parent)
    try:
        with hold(folder.with_name(f".{folder.name}.lock"), wait_s=timeout_s):
            if folder.is_dir():
                return False
            _build(folder, build, private_since)
    except LockHeldError as error:
        raise Refusal(
            f"another process has been building {folder} for over {timeout_s:.0f} s: stop it, or wait and try again"
        ) from error
    return True


def _build(folder: Path, build: Callable[[Path], None], private_since: float | None) -> None:
    aside = folder.with_name(f".{folder.name}.building")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        if private_since is not None:
            keep_private(aside, private_since)
        build(aside)
        for path in (*aside.rglob("*"), aside):
            sync_folder(path) if path.is_dir() else sync_file(path)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    sync_folder(folder.parent)
