"""What SGLang is told on a machine without CUDA."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from models.capture.sglang import cpu_platform

DECLARE = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from models.capture.sglang import cpu_platform
for _ in range(2):
    cpu_platform._declare_torchvision_operators()
print(hasattr(torch.ops.torchvision, "nms"))
"""
ACTIVATE = """
import sys
sys.path.insert(0, sys.argv[1])
from models.capture.sglang import cpu_platform
print(cpu_platform.activate() == cpu_platform.PLATFORM)
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


VENDORS = "[sglang.srt.platforms]\nvendor = somewhere:activate\n"
KERNELS = 'import torch\nlibrary = torch.library.Library("sgl_kernel", "FRAGMENT")\n'
KERNELS += 'library.define("convert_weight_packed(Tensor weight) -> Tensor")\n'


@pytest.mark.parametrize(
    ("files", "chosen", "expected"),
    [
        ({}, None, True),
        ({"sgl_kernel.py": KERNELS}, None, False),
        ({"sgl_kernel.py": ""}, None, True),  # those for GPUs alone
        ({"sgl_kernel.py": "raise ImportError('libcuda.so.1')"}, None, True),
        ({"vendor-1.dist-info/entry_points.txt": VENDORS}, None, False),
        ({"vendor-1.dist-info/entry_points.txt": VENDORS}, "draftsmith_cpu", True),
        ({"sgl_kernel.py": KERNELS}, "draftsmith_cpu", True),
    ],
    ids=str,
)
def test_a_server_that_computes_on_something_else_keeps_it(
    tmp_path: Path, files: dict[str, str], chosen: str | None, expected: bool
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    environment = {name: value for name, value in os.environ.items() if name != "SGLANG_PLATFORM"}
    environment |= {"CUDA_VISIBLE_DEVICES": ""} | ({} if chosen is None else {"SGLANG_PLATFORM": chosen})
    said = subprocess.run(
        [sys.executable, "-c", ACTIVATE, str(tmp_path)],
        env=environment, capture_output=True, text=True, check=True, timeout=300,
    ).stdout  # fmt: skip
    assert said == f"{expected}\n"


def test_other_accelerators_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    monkeypatch.setattr("torch.accelerator.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cpu_platform.activate() is None


STOCK = {
    "sglang/__init__.py": "",
    "sglang/srt/__init__.py": "",
    "sglang/srt/platforms/__init__.py": "",
    "sglang/srt/platforms/cpu.py": "class CpuDeviceMixin: ...",
    "sglang/srt/platforms/device_mixin.py": "class PlatformEnum:\n    OOT = 'oot'",
    "sglang/srt/platforms/interface.py": "class SRTPlatform: ...\nPlatformCapabilities = dict",
    "sglang/srt/plugins/__init__.py": "",
    "sglang/srt/plugins/hook_registry.py": """
from types import SimpleNamespace
HookType = SimpleNamespace(AROUND="around")
hooks = {}
HookRegistry = SimpleNamespace(register=lambda target, hook, kind: hooks.update({(target, kind): hook}))
""",
}
BIND = """
import sys, torch
sys.path.insert(0, sys.argv[1])
import models.capture.sglang.cpu_platform_class
from sglang.srt.plugins.hook_registry import hooks
bind = hooks["sglang.srt.distributed.bootstrap._init_cpu_threads_env", "around"]
bind(lambda **named: print("bound without kernels"), local_omp_cpuid=[0])
library = torch.library.Library("sgl_kernel", "FRAGMENT")
library.define("init_cpu_threads_env(str cores) -> str")
bind(lambda **named: print("bound", named), local_omp_cpuid=[0])
"""


def test_threads_are_bound_only_where_sglangs_kernels_are_installed(tmp_path: Path) -> None:
    """SGLang asks for these kernels on every ARM processor; without them a server would end as it starts."""
    for name, text in STOCK.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-c", BIND, str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    assert said == "bound {'local_omp_cpuid': [0]}\n"
