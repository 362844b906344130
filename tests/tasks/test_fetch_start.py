"""The export of a registered version is fetched once, and what is not there is refused or left out."""

from pathlib import Path

import pytest
from prefect.logging import disable_run_logger

from infra.files.run_folder import RunFolder
from infra.processes.process import Owner
from infra.tracking import registry, runs
from infra.tracking.promotion import DraftInService
from infra.tracking.runs import TrackedRun
from models.config.recipe import load_recipe
from tasks.prepare import fetch_start
from tasks.run import OpenRun

RECIPE = Path(__file__).parents[2] / "recipes" / "tiny.yaml"


@pytest.fixture
def uri(registry_uri: str) -> str:
    return registry_uri


def open_run(tmp_path: Path, uri: str, start_from: object) -> OpenRun:
    config = load_recipe(RECIPE, [f"tracking.uri={uri}", f"training.start_from={start_from}"])
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir(exist_ok=True)
    return OpenRun(config, folder, Owner("test", folder.logs))


def register(tmp_path: Path, uri: str, text: str, **tags: str) -> int:
    runs.start_run(tmp_path / f"{text}.json", uri, "test", text, {}, {})
    run, export = TrackedRun.read(tmp_path / f"{text}.json"), tmp_path / text
    export.mkdir()
    (export / "config.json").write_text(text)
    model = runs.log_folder(run, export, "draft", 1, "draft")
    return registry.register(uri, "draft-tiny", model, run.run_id, tags).version


def fetch(run: OpenRun) -> int | None:
    with disable_run_logger():
        found = fetch_start.fn(run)
    return found and found.version


def test_the_champion_of_the_first_start_is_kept(tmp_path: Path, uri: str):
    run = open_run(tmp_path, uri, "champion")
    assert fetch(run) is None, "no champion yet: a new draft"
    assert not run.folder.start.exists()
    DraftInService(uri, "draft-tiny").promote(register(tmp_path, uri, "first"), by="tests", reason="")
    assert fetch(run) == 1
    DraftInService(uri, "draft-tiny").promote(register(tmp_path, uri, "second"), by="tests", reason="")
    assert fetch(run) is None, "a resumed run goes on with what it began with"
    assert (run.folder.start / "config.json").read_text() == "first"


def test_a_version_by_its_number(tmp_path: Path, uri: str):
    register(tmp_path, uri, "first")
    register(tmp_path, uri, "second")
    run = open_run(tmp_path, uri, 1)
    assert fetch(run) == 1
    assert (run.folder.start / "config.json").read_text() == "first"
    other = open_run(tmp_path / "run", uri, 7)
    with pytest.raises(ValueError, match="has no version 7"):
        fetch(other)
    cold = open_run(tmp_path / "run" / "run", uri, "null")
    assert fetch(cold) is None


def test_the_furthest_is_the_newest_while_it_is_ahead_of_the_champion(tmp_path: Path, uri: str):
    def next_start(name: str) -> int | None:
        (tmp_path / name).mkdir()
        return fetch(open_run(tmp_path / name, uri, "furthest"))

    def refused(text: str, unproven: str, against: str) -> int:
        tags = {registry.UNPROVEN: unproven, registry.MEASURED_AGAINST: against}
        version = register(tmp_path, uri, text, **tags)
        DraftInService(uri, "draft-tiny").refuse(version, by="gate", reason="not surely")
        return version

    assert next_start("a") is None, "no version yet: a new draft"
    assert refused("1", "true", "") == next_start("b") == 1, "no champion: the draft that is ahead of no draft"
    DraftInService(uri, "draft-tiny").promote(register(tmp_path, uri, "2"), by="tests", reason="")
    assert next_start("c") == 2
    assert refused("3", "true", "2") == next_start("d") == 3
    assert refused("4", "true", "2") == next_start("e") == 4
    assert refused("5", "false", "2") == 5
    assert next_start("f") == 2, "what came of the version that was ahead is not"
    tags = {registry.GATE: "passed", registry.MEASURED_AGAINST: "2"}
    assert register(tmp_path, uri, "waits", **tags) == next_start("h") == 6, "it waits for approval"
    DraftInService(uri, "draft-tiny").refuse(6, by="ada", reason="not now")
    assert next_start("i") == 2
    assert refused("6", "true", "1") == 7
    assert next_start("g") == 2, "it never met the champion"
