"""Versions of a draft in folders of their own, FOLDER/DRAFT/VERSION: whole, and with the registered weights."""

import json
import re
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.files.atomic import sha256_file, write_atomically
from infra.records.acceptance import RequestCounts
from infra.records.drafts import WEIGHTS
from infra.refusal import Refusal
from infra.serving.rollout import NO_DRAFT
from infra.sglang.command import draft_arguments
from infra.tracking import registry

SETTINGS = Path("serving", "sglang.json")
ADAPTIVE = Path("serving", "sglang_adaptive.json")
COUNTS = "request_counts.json"
FLAGS_OF_EXPORTS = (
    "--dtype",
    "--speculative-algorithm",
    "--speculative-domino-candidate-pool-size",
    "--speculative-draft-attention-backend",
    "--speculative-draft-model-quantization",
    "--speculative-draft-window-size",
    "--speculative-eagle-topk",
    "--speculative-num-draft-tokens",
    "--speculative-num-steps",
)
"""SGLang's arguments that exports write (models/export/serving_settings.py), each followed by one word."""
ADAPTIVE_FLAG = "--speculative-adaptive"
"""The only one without a value."""
WORD = re.compile(r"[A-Za-z0-9_]+")
DOWNLOADS = 3
"""Of a version whose weights are not those that were registered."""


class BrokenVersionError(Exception):
    """A version that cannot be served, however often it is fetched."""


@dataclass(frozen=True)
class VersionFolder:
    """A version that lies ready."""

    version: int
    path: Path
    arguments: tuple[str, ...]
    """SGLang's, the draft's path among them; empty: the target alone is faster, by the version's benchmark."""
    counts: RequestCounts | None
    """Of its benchmark; None for a version without."""


def fetch(uri: str, draft: str, version: int, folder: Path) -> Path:
    """Download a version, unless it is there; returns its folder.

    Raises BrokenVersionError for weights that are not those that were registered. Other errors are of registry or disk.
    """
    place, registered = folder / draft / str(version), registry.find_version(uri, draft, version)
    wanted, counts = registered.tags.get(registry.WEIGHTS_SHA256), place.parent / f"{version}-{COUNTS}"
    for _ in range(DOWNLOADS):
        if not place.is_dir():
            place.parent.mkdir(parents=True, exist_ok=True)
            registry.download(uri, registered, place)
        found = _digest(place)
        if wanted in (None, found):
            break
        # Damaged on the way, or since, or of a registered model that was deleted: MLflow gives its numbers again.
        shutil.rmtree(place)
        counts.unlink(missing_ok=True)
    else:
        assert wanted is not None, "it would have been taken as it is"
        raise BrokenVersionError(
            f"its weights in the registry have the SHA-256 {found and found[:12]}, {wanted[:12]} when it was registered"
        )
    if not counts.is_file():
        try:
            # It holds prompts.
            write_atomically(counts, registry.read_artifact(uri, registered, registry.REQUEST_COUNTS), mode=0o600)
        except Refusal:  # registered without a benchmark: there is nothing to compare with
            write_atomically(counts, "null\n")
    return place


def _digest(place: Path) -> str | None:
    return sha256_file(place / WEIGHTS) if (place / WEIGHTS).is_file() else None


def open_version(place: Path, given: Collection[str] | None, adaptive: bool) -> VersionFolder:
    """A fetched version with its arguments: those `given`, or its own.

    Raises Refusal for one that says nothing, or that SGLang does not serve, and BrokenVersionError for arguments of its
    own that no export writes.
    """
    arguments = tuple(given) if given is not None else _own_arguments(place, adaptive)
    if arguments:
        arguments = (*draft_arguments(place), *arguments)
    return VersionFolder(int(place.name), place, arguments, _counts(place.parent / f"{place.name}-{COUNTS}"))


def _counts(file: Path) -> RequestCounts | None:
    try:
        return RequestCounts.read(file)
    except (FileNotFoundError, Refusal):  # none, or of another version of Draftsmith: nothing to compare with
        return None


def _own_arguments(place: Path, adaptive: bool) -> tuple[str, ...]:
    try:
        settings: dict[str, Any] = json.loads((place / SETTINGS).read_text())
        main_load: Any = settings["arguments"]
        if not isinstance(main_load, list):
            raise TypeError("no list")
    except (FileNotFoundError, RecursionError, ValueError, KeyError, TypeError) as error:
        raise Refusal(
            f"version {place.name} says no arguments for SGLang (no `arguments` in {SETTINGS}): SGLang does not serve "
            "such a draft, or it was registered without a benchmark or by an older Draftsmith: set `arguments`"
        ) from error
    own = settings.get("adaptive_arguments") if adaptive else None
    if own:
        return (*check_arguments(own, place.name), "--speculative-adaptive-config", str(place / ADAPTIVE))
    return check_arguments(main_load, place.name)


def check_arguments(arguments: object, version: str) -> tuple[str, ...]:
    """A version's own arguments for SGLang. Raises BrokenVersionError for those that no export writes.

    Whoever may write to MLflow chooses them, and others of SGLang's load code, or open the server to the network.
    """
    checked: list[str] = []
    left: Iterator[object] = iter(arguments if isinstance(arguments, list) else [arguments])
    for flag in left:
        if flag == ADAPTIVE_FLAG:
            checked.append(ADAPTIVE_FLAG)
            continue
        value = next(left, None)
        known = next((one for one in FLAGS_OF_EXPORTS if one == flag), None)
        if known is None or not isinstance(value, str) or not WORD.fullmatch(value):
            said = "" if known is None else f" with the value {value!r:.80}"
            raise BrokenVersionError(
                f"version {version} asks for the argument {flag!r:.80}{said} in {SETTINGS}, which no export of "
                "Draftsmith writes: register it again with what its benchmark wrote, or set `arguments`"
            )
        checked += [known, value]
    return tuple(checked)


def remove_others(folder: Path, draft: str, keep: Collection[int]) -> list[int]:
    """Remove the folders of all versions but these; returns the removed ones."""
    removed = []
    for place in (folder / draft).glob("[0-9]*"):
        if place.is_dir() and place.name.isdigit() and int(place.name) not in {*keep, NO_DRAFT}:
            shutil.rmtree(place)
            (place.parent / f"{place.name}-{COUNTS}").unlink(missing_ok=True)
            removed.append(int(place.name))
    return sorted(removed)
