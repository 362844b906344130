"""Which registered version a server runs, from what the server reports.

Four sources, the surest first:

1. Weights that the serving follower put into the running server.
2. The reported folder, where this machine can read it: the hash of its weights is a tag of the version.
3. The version in the reported path: `.../NAME/3`, `.../NAME-v3`, `.../NAME@3`, or the id of the logged model.
4. A label that the operator gave the server: `--weight-version NAME@3` or `--served-model-name NAME@3`.

A folder that can be read and holds other weights is unknown, whatever its name says.
"""

import json
import os.path
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from infra.drift.scrape import Scrape, ServedDraft
from infra.drift.traffic import TrafficRecord
from infra.files.atomic import sha256_file
from infra.records.acceptance import RegisteredDraft
from infra.records.drafts import BLOCK, CONFIG, WEIGHTS
from infra.tracking.registry import RUN, WEIGHTS_SHA256


@dataclass(frozen=True)
class Identity:
    """A registered version, or why it is none."""

    version: int | None
    reason: str = ""


def identify_all(record: TrafficRecord, seen: Scrape, versions: Sequence[RegisteredDraft]) -> dict[str, Identity]:
    """The version that each server runs: found at the first look after its start, kept until the next start."""
    by_draft: dict[ServedDraft, Identity] = {}
    found: dict[str, Identity] = {}
    for url, reading in seen.readings.items():
        known = record.version_of(url, reading)
        if known in {one.version for one in versions}:
            found[url] = Identity(known)
            continue
        # Several servers often load the same folder, whose weights are hashed once.
        asked = reading.draft.model_copy(update={"start": ""})
        if asked not in by_draft:
            by_draft[asked] = identify(asked, record.draft, versions)
        found[url] = by_draft[asked]
    return found


def identify(draft: ServedDraft, name: str, versions: Sequence[RegisteredDraft]) -> Identity:
    """Find the version of `name` that a server runs."""
    if draft.path is None:
        return Identity(None, "it runs no draft model")
    numbers = {version.version for version in versions}
    if draft.swapped is not None:
        version = next((number for number in _numbers(name, draft.swapped) if number in numbers), None)
        return Identity(version, "" if version else f"{draft.swapped} was put into it while it ran")
    folder = Path(draft.path)
    # Path.is_file raises where this process may not enter the folder.
    if os.path.isfile(folder / WEIGHTS):
        with suppress(OSError):  # another user's file, or one that is being replaced
            version = _by_content(folder, versions)
            return Identity(
                version, "" if version else f"the weights in {folder} are of no registered version of {name}"
            )
    by_model = [one.version for one in versions if one.model_id and one.model_id in folder.parts]
    named = [*by_model, *_numbers(name, draft.path), *(n for label in draft.labels for n in _numbers(name, label))]
    version = next((number for number in named if number in numbers), None)
    if version is not None:
        return Identity(version)
    return Identity(
        None,
        f"nothing says which version of {name} is at {draft.path}, which cannot be read here: serve a version from a "
        f"folder {name}/VERSION, or start the server with --weight-version {name}@VERSION",
    )


def _by_content(folder: Path, versions: Sequence[RegisteredDraft]) -> int | None:
    """The newest version with these weights; one that carries no hash is found by the run that made it."""
    digest = sha256_file(folder / WEIGHTS)
    same = [one.version for one in versions if one.tags.get(WEIGHTS_SHA256) == digest]
    if not same:
        run = _run_of(folder)
        same = [one.version for one in versions if WEIGHTS_SHA256 not in one.tags and run and one.tags.get(RUN) == run]
    return max(same, default=None)


def _run_of(folder: Path) -> str | None:
    """The run that an export says it comes from."""
    try:
        described = json.loads((folder / CONFIG).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return described.get(BLOCK, {}).get("run") if isinstance(described, dict) else None


def _numbers(name: str, text: str) -> list[int]:
    """Versions of `name` that a path or a label names."""
    return [int(number) for number in re.findall(rf"(?:^|/){re.escape(name)}(?:/v?|@|-v)(\d+)(?=/|$)", text)]
