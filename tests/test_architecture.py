"""What import-linter cannot say: which files of `models` the control plane sees, and how long things may get."""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted(path for folder in ("flows", "tasks", "models", "infra") for path in (ROOT / folder).rglob("*.py"))
FORBIDDEN_NAMES = {"utils", "common", "helpers", "core", "manager"}
MAIN_PATH = (
    ("flows.command_line", "models.training.launch"),
    ("flows.command_line", "models.capture.generator"),
    ("models.capture.generator", "models.capture.plain_engine"),  # a sample is captured
    ("models.training.launch", "models.training.stream"),  # its hidden states become a micro-batch
    ("models.training.launch", "models.drafts.eagle3.module"),  # the draft's loss
    ("models.training.launch", "models.training.lightning_module"),  # the optimizer step
)
"""Stretches of the way from the command line to a capture and to an optimizer step."""
CHOSEN_BY_NAME = {"models.drafts.registry": "models.drafts.eagle3.module"}
"""Imports whose module's name is put together at run time."""


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
    """But for the first, which loads nothing: while a process imports, it wants no collector and no traceback."""
    packages = set((ROOT / "models").rglob("__init__.py"))
    assert {path for path in packages if path.read_text()} == {ROOT / "models" / "__init__.py"}
    loaded = ast.walk(ast.parse((ROOT / "models" / "__init__.py").read_text()))
    assert {name.name for one in loaded if isinstance(one, ast.Import | ast.ImportFrom) for name in one.names} == {
        "gc",
        "signal",
        "sys",
    }


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_small(path):
    text = path.read_text()
    assert path.stem not in FORBIDDEN_NAMES
    assert text.count("\n") <= 400
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 60, node.name


def reached_from(starts: Iterable[str], edges: Mapping[str, set[str]]) -> set[str]:
    reached, left = set(starts), list(starts)
    while left:
        new = edges[left.pop()] - reached
        reached |= new
        left += new
    return reached


def main_path() -> list[Path]:
    """Every file on a way from the command line to an optimizer step and to a capture.

    A step of the way is an import, or the name of a module that is started as a process.
    """
    graph = grimp.build_graph("flows", "tasks", "models", "infra", exclude_type_checking_imports=True)
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in SOURCES}
    forward: dict[str, set[str]] = {}
    for name, path in files.items():
        nodes = ast.walk(ast.parse(path.read_text()))
        started = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        imported = graph.find_modules_directly_imported_by(name) if name in graph.modules else set()
        forward[name] = ((imported | started) & files.keys()) | {CHOSEN_BY_NAME.get(name, name)}
    backward: dict[str, set[str]] = {name: set() for name in files}
    for name, targets in forward.items():
        for target in targets:
            backward[target].add(name)
    stretches = (reached_from([start], forward) & reached_from([end], backward) for start, end in MAIN_PATH)
    return [files[name] for name in sorted(set().union(*stretches))]


def test_the_main_path_stays_short():
    lines = {path.relative_to(ROOT): path.read_text().count("\n") for path in main_path()}
    print(*(f"{count:5} {path}" for path, count in lines.items()), sep="\n")
    assert len(lines) > 10
    assert sum(lines.values()) < 2000


def reads_environment(node: ast.AST) -> bool:
    def is_environ(part: ast.AST) -> bool:
        return ast.unparse(part) in ("os.environ", "environ")

    match node:
        case ast.Subscript(value=value, ctx=ast.Load()):
            return is_environ(value)
        case ast.Call(func=ast.Attribute(value=value, attr="get" | "items" | "copy")):
            return is_environ(value)
        case ast.Call(func=function):
            return ast.unparse(function) in ("os.getenv", "getenv")
        case ast.Compare(comparators=comparators):
            return any(map(is_environ, comparators))
    return False


def test_only_one_file_reads_the_environment():
    readers = [path for path in SOURCES if any(map(reads_environment, ast.walk(ast.parse(path.read_text()))))]
    assert [str(path.relative_to(ROOT)) for path in readers] == ["infra/settings.py"]


def test_at_most_three_broad_excepts():
    handlers = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or "Exception" in ast.unparse(node.type).split(", "))
    ]
    assert len(handlers) <= 3, handlers


def test_a_class_name_is_used_once() -> None:
    classes = Counter(
        node.name
        for file in SOURCES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in classes.items() if count > 1] == []


def test_processes_that_load_no_weights_import_no_modelling_code() -> None:
    """It takes seconds of each, several times in a run."""
    processes = ("data.prepare", "export.sglang", "capture.generator", "capture.collect", "regeneration.regenerate")
    names = ", ".join(f"models.{name}" for name in processes)
    code = f"import {names}, sys; print([name for name in sys.modules if 'modeling_' in name])"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert set(ast.literal_eval(asked.stdout)) <= {
        "transformers.modeling_rope_utils", "transformers.modeling_flash_attention_utils",
        "transformers.models.auto.modeling_auto",
    }  # fmt: skip
