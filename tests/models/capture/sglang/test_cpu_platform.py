"""What SGLang is told on a machine without CUDA."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

DECLARE = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from models.capture.sglang import cpu_platform
for _ in range(2):
    cpu_platform._declare_torchvision_operators()
print(hasattr(torch.ops.torchvision, "nms"))
"""
LOADS = Path(str(psutil._psplatform.cext.__file__)).read_bytes()


@pytest.mark.parametrize(("library", "declared"), [(LOADS, False), (b"links CUDA", True), (None, True)])
def test_operators_are_declared_where_torchvision_does_not_declare_them(
    tmp_path: Path, library: bytes | None, declared: bool
) -> None:
    """In a process of its own, where a second declaration would end it."""
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").touch()
    if library is not None:
        (package / "_C.so").write_bytes(library)
    command = [sys.executable, "-c", DECLARE, str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    assert said == f"{declared}\n"
