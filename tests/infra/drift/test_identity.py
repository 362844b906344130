"""Which registered version a server runs."""

import json
from pathlib import Path

import pytest

from infra.drift.identity import identify
from infra.drift.scrape import ServedDraft
from infra.files.atomic import sha256_file, write_atomically
from infra.records.acceptance import RegisteredDraft
from infra.tracking.registry import RUN, WEIGHTS_SHA256


def version(number: int, **tags: str) -> RegisteredDraft:
    return RegisteredDraft(name="draft-tiny", version=number, model_id=f"m-{number}", aliases=(), tags=tags)


VERSIONS = [version(1), version(2), version(12)]


def served(path: str | None, *labels: str) -> ServedDraft:
    return ServedDraft(start="s", path=path, labels=labels)


@pytest.mark.parametrize(
    ("path", "labels", "expected"),
    [
        ("/drafts/draft-tiny/2", (), 2),
        ("/drafts/draft-tiny/12/", (), 12),
        (f"/{'x' * 300}/draft-tiny/2", (), 2),  # stat fails, as for a folder that may not be entered
        ("/drafts/draft-tiny-v2", (), 2),
        ("/drafts/draft-tiny@2/export", (), 2),
        ("/store/models/m-1/artifacts", (), 1),
        ("/drafts/current", ("default", "draft-tiny@2"), 2),
        ("/drafts/current", ("default",), None),
        ("/drafts/another-draft-tiny/2", (), None),
        ("/drafts/draft-tiny/7", (), None),
        (None, ("draft-tiny@2",), None),
    ],
)
def test_a_folder_that_cannot_be_read_is_known_by_name(path: str | None, labels: tuple[str, ...], expected: int | None):
    identity = identify(served(path, *labels), "draft-tiny", VERSIONS)
    assert identity.version == expected
    assert bool(identity.reason) is (expected is None)


@pytest.mark.parametrize(("swapped", "expected"), [("draft-tiny@12", 12), ("draft-tiny@7", None), ("other@2", None)])
def test_swapped_weights_come_before_the_folder(swapped: str, expected: int | None):
    draft = served("/drafts/draft-tiny/2").model_copy(update={"swapped": swapped})
    assert identify(draft, "draft-tiny", VERSIONS).version == expected


def test_a_folder_that_can_be_read_is_known_by_its_weights(tmp_path: Path):
    """Whatever its name says."""
    folder = tmp_path / "draft-tiny" / "1"
    write_atomically(folder / "model.safetensors", "weights")
    write_atomically(folder / "config.json", json.dumps({"draftsmith": {"run": "run-a"}}))
    hashed = version(2, **{WEIGHTS_SHA256: sha256_file(folder / "model.safetensors"), RUN: "run-a"})
    without_hash, other = version(12, **{RUN: "run-a"}), version(1, **{WEIGHTS_SHA256: "0" * 64, RUN: "run-a"})
    assert identify(served(str(folder)), "draft-tiny", [other, hashed, without_hash]).version == 2
    assert identify(served(str(folder)), "draft-tiny", [other, without_hash]).version == 12
    unknown = identify(served(str(folder)), "draft-tiny", [other])
    assert unknown.version is None
    assert "no registered version" in unknown.reason


def test_weights_that_cannot_be_read_say_nothing(tmp_path: Path):
    folder = tmp_path / "draft-tiny" / "2"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").symlink_to("/proc/self/mem")  # a file whose first byte nobody can read
    assert identify(served(str(folder)), "draft-tiny", VERSIONS).version == 2
