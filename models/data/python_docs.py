"""Real text without a download: Python's documentation topics and the docstrings of its standard library.

Docstrings are parsed from the sources, which are never imported.
"""

import ast
import hashlib
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from infra.refusal import Refusal

DOCUMENT_CHARACTERS = 1500
"""Docstrings of a module are joined to documents of at least this length."""

_SKIPPED = {
    *("__pycache__", "dist-packages", "ensurepip", "idle_test", "idlelib", "lib2to3"),
    *("pydoc_data", "site-packages", "test", "tests", "turtledemo"),
}

_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def standard_library() -> list[Path]:
    """The standard library's source files without tests and tools, sorted."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (path for path in root.rglob("*.py") if not _SKIPPED & set(path.relative_to(root).parts))
    return sorted(path for path in files if not path.name.startswith("_sysconfigdata"))


def source_hash() -> str:
    """Hash of all files that `documents` reads."""
    digest = hashlib.sha256()
    for path in (*standard_library(), _topics_file()):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def documents() -> Iterator[tuple[str, str]]:
    """(place, text) of every document, in a stable order, without repeated docstrings."""
    yield from _topics()
    root = Path(sysconfig.get_paths()["stdlib"])
    seen: set[str] = set()
    for path in standard_library():
        module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        with tokenize.open(path) as file:
            tree = ast.parse(file.read())
        entries = _entries(module, tree, seen)
        for number, text in enumerate(_joined(entries)):
            yield f"{module}#{number}", text


def _topics_file() -> Path:
    return Path(sysconfig.get_paths()["stdlib"]) / "pydoc_data" / "topics.py"


def _topics() -> Iterator[tuple[str, str]]:
    if not _topics_file().is_file():
        raise Refusal(f"{_topics_file()} is missing: this Python was installed without its documentation topics")
    from pydoc_data.topics import topics

    for name in sorted(topics):
        yield f"topic {name}", topics[name].strip()


def _entries(module: str, tree: ast.Module, seen: set[str]) -> Iterator[str]:
    """Each docstring of a module under its heading: the module's own, then those of functions and classes."""
    heading = f"{module}\n{'=' * len(module)}"
    if text := _new_docstring(tree, seen):
        yield f"{heading}\n\n{text}"
    else:
        yield heading
    yield from _definitions(module, tree.body, seen)


def _definitions(prefix: str, body: list[ast.stmt], seen: set[str]) -> Iterator[str]:
    for node in body:
        if not isinstance(node, _Definition):
            continue
        name = f"{prefix}.{node.name}"
        if text := _new_docstring(node, seen):
            yield f"{_signature(name, node)}\n\n{text}"
        if isinstance(node, ast.ClassDef):
            yield from _definitions(name, node.body, seen)


def _signature(name: str, node: _Definition) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {name}({bases})" if bases else f"class {name}"
    keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    return f"{keyword} {name}({ast.unparse(node.args)})"


def _new_docstring(node: ast.Module | _Definition, seen: set[str]) -> str | None:
    text = (ast.get_docstring(node) or "").strip()
    if not text or text in seen:
        return None
    seen.add(text)
    return text


def _joined(entries: Iterator[str]) -> Iterator[str]:
    heading = next(entries)
    parts, size = [heading], len(heading)
    for entry in entries:
        if size >= DOCUMENT_CHARACTERS:
            yield "\n\n".join(parts)
            parts, size = [], 0
        parts.append(entry)
        size += len(entry)
    if parts != [heading] or "\n\n" in heading:
        yield "\n\n".join(parts)
