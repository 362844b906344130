"""docs/results.md and docs/scale.md show what the files of benchmarks/results/ hold."""

import importlib
import json
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def results_page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("results_page")


@pytest.fixture
def page_conditions(results_page: ModuleType) -> ModuleType:
    return importlib.import_module("page_conditions")


def test_the_page_of_results_is_current(results_page: ModuleType) -> None:
    assert results_page.PAGE.read_text() == results_page.page(), "run: python benchmarks/results_page.py"


def test_the_measured_tables_of_the_page_on_scale_are_current(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    scale_page = importlib.import_module("scale_page")
    text = scale_page.PAGE.read_text()
    assert scale_page.page(text) == text, "run: python benchmarks/scale_page.py"


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*.md")), ids=lambda path: path.stem)
def test_the_pages_of_methods_are_made_of_their_results(path: Path, results_page: ModuleType) -> None:
    page = importlib.import_module("methods_table").page
    assert path.read_text() == page(json.loads(path.with_suffix(".json").read_text()))


def test_a_dirty_tree_an_unknown_commit_and_the_processor_are_shown(page_conditions: ModuleType) -> None:
    run = {"hardware": "2 CPU cores (x86_64), 0 GPUs", "cpu": "Intel(R) Xeon(R) Processor", "date": "2026-01-01"}
    assert (
        page_conditions.conditions(run | {"commit": "abcdef1234-dirty"})
        == "2 CPU cores (Intel Xeon), 2026-01-01, abcdef1-dirty"
    )
    assert page_conditions.conditions(run | {"commit": "unknown"}).endswith("2026-01-01, unknown commit")
    assert page_conditions.conditions(run).endswith("2026-01-01, unknown commit")
    assert page_conditions.conditions(run | {"commit": "fdece49b84"}).endswith(", unknown commit (fdece49)")


def test_a_row_that_was_measured_apart_keeps_its_own_day_and_commit(page_conditions: ModuleType) -> None:
    later = {"commit": "bbbbbbbb", "date": "2026-01-03", "cpu": "AMD EPYC", "seed": 2}
    result = {"commit": "aaaaaaaa", "date": "2026-01-01", "cpu": "Intel(R) Xeon(R)"}
    assert page_conditions.conditions(result | {"drafts": {"one pass, seed 2": later, "one pass, seed 0": {}}}) == (
        "Intel Xeon, 2026-01-01, aaaaaaa; seed 2: AMD EPYC, 2026-01-03, bbbbbbb"
    )
    assert page_conditions.conditions(result | {"rows": [{"seed": 0}, later]}).endswith(
        "; seed 2: AMD EPYC, 2026-01-03, bbbbbbb"
    )


def test_every_commit_on_the_page_is_in_the_history_or_called_unknown(results_page: ModuleType) -> None:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout

    history = {line[:7] for line in git("rev-list", "--all").split()}
    named = set(re.findall(r"[ ,]([0-9a-f]{7})(?:-dirty)?\b", results_page.page()))
    assert named
    if git("rev-parse", "--is-shallow-repository").strip() == "false":
        assert named <= history


def test_what_an_arm_of_live_captured_is_its_own_count(results_page: ModuleType) -> None:
    found = json.loads((results_page.RESULTS / "live.json").read_text())
    full = [row[0] for row in results_page.live(found) if "its store is full" in row[0]]
    assert full
    assert all("0 texts captured" in label for label in full)


def test_a_seed_that_failed_and_ran_again_is_told(results_page: ModuleType) -> None:
    found = json.loads((results_page.RESULTS / "chaos.json").read_text())
    rows = [" ".join(map(str, row[:2])) for row in results_page.chaos(found)]
    assert any("264" in row and "b6e36f3" in row for row in rows)


def test_no_two_rows_say_the_same_of_different_figures(results_page: ModuleType) -> None:
    """A row is read without its neighbours, so what was measured has to tell it apart."""
    lines = [line.split(" | ") for line in results_page.page().splitlines() if line.startswith("| ")]
    seen: dict[tuple[str, str], str] = {}
    for what, figure, *rest in lines:
        if len(rest) == 2:
            assert seen.setdefault((what, rest[0] + rest[1]), figure) == figure, what
