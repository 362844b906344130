"""What import-linter cannot say: which files of `models` the control plane sees, and how long things may get."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(path for folder in ("flows", "tasks", "models", "infra") for path in (ROOT / folder).rglob("*.py"))
FORBIDDEN_NAMES = {"utils", "common", "helpers", "core", "manager"}
# recipe -> flow -> task -> process -> loop: what a newcomer reads to understand a run.
MAIN_PATH = [
    "recipes/quickstart.yaml",
    "flows/retrain_draft.py",
    "tasks/generators.py",
    "tasks/training.py",
    "infra/processes/process.py",
    "models/run.py",
    "models/capture/generator.py",
    "models/training/trainer.py",
    "models/training/stream.py",
    "models/training/lightning_module.py",
    "models/drafts/eagle3/module.py",
]


def imports(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return names


def test_there_are_sources_to_check():
    assert len(SOURCES) > 40


@pytest.mark.parametrize("path", [p for p in SOURCES if p.relative_to(ROOT).parts[0] in ("flows", "tasks")], ids=str)
def test_the_control_plane_sees_only_configuration_of_models(path):
    reached = [name for name in imports(path) if name.split(".")[0] == "models"]
    assert all(name.startswith("models.config.") for name in reached), reached


def test_packages_of_models_are_empty():
    assert all(path.read_text() == "" for path in (ROOT / "models").rglob("__init__.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_small(path):
    text = path.read_text()
    assert path.stem not in FORBIDDEN_NAMES
    assert text.count("\n") <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 60, node.name


def test_the_main_path_reads_in_under_1500_lines():
    assert sum((ROOT / name).read_text().count("\n") for name in MAIN_PATH) < 1500


def test_only_one_file_reads_the_environment():
    readers = [p for p in SOURCES if "os.environ.get" in p.read_text() or "os.getenv" in p.read_text()]
    assert [str(p.relative_to(ROOT)) for p in readers] == ["infra/settings.py"]
