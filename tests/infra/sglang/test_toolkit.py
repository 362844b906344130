"""CUDA's toolkit of SGLang's environment: packages as NVIDIA lays them out, and servers that are told of it."""

import os
from pathlib import Path

import pytest

from infra.processes.process import Owner, ProcessFailedError
from infra.sglang.server import SGLangServer
from infra.sglang.toolkit import driver_library, lay_out, own_toolkit, toolkit_variables


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    folder = tmp_path / "packages" / "nvidia" / "cu13"
    for name in ("bin/nvcc", "include/cuda_runtime.h", "nvvm/bin/cicc", "lib/libcudart.so.13", "lib/libcudart_static.a",
                 "lib/libnvrtc-builtins.so.13.0", "lib/libcheckpoint.so"):  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def test_everything_is_where_compilers_look_for_it(packages: Path, tmp_path: Path) -> None:
    toolkit, driver, tool = tmp_path / "cuda", tmp_path / "libcuda.so.1", tmp_path / "cuobjdump"
    for file in (driver, tool):
        file.write_text(file.name)
    lay_out(packages, toolkit, tmp_path / "none")
    lay_out(packages, toolkit, driver, [tool])  # again, as after an update
    wanted = {
        "bin/nvcc": "bin/nvcc", "include/cuda_runtime.h": "include/cuda_runtime.h", "nvvm/bin/cicc": "nvvm/bin/cicc",
        "lib64/libcudart.so": "lib/libcudart.so.13", "lib64/libcudart.so.13": "lib/libcudart.so.13",
        "lib64/libcudart_static.a": "lib/libcudart_static.a", "lib64/libcheckpoint.so": "lib/libcheckpoint.so",
        "lib64/libnvrtc-builtins.so": "lib/libnvrtc-builtins.so.13.0", "lib64/stubs/libcuda.so": "libcuda.so.1",
        "lib/libcudart.so": "lib/libcudart.so.13", "bin/cuobjdump": "cuobjdump",
    }  # fmt: skip
    assert {name: (toolkit / name).read_text() for name in wanted} == wanted


def test_the_drivers_library_is_named_whether_or_not_there_is_one() -> None:
    """Containers get it when they start; where it is there, it is one of 64 bits."""
    found = driver_library()
    assert found.name == "libcuda.so.1"
    assert not found.exists() or found.read_bytes()[:5] == b"\x7fELF\x02"


def test_a_server_is_told_of_its_environments_toolkit(
    packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = tmp_path / "environment"
    python = environment / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to("/bin/sh")
    monkeypatch.setenv("CUDA_HOME", "/opt/cuda-12.4")
    assert own_toolkit(environment) is None
    assert started(python, tmp_path / "before") == "/opt/cuda-12.4"
    lay_out(packages, environment / "cuda", driver_library())
    assert started(python, tmp_path / "with") == str(environment / "cuda")
    assert toolkit_variables(Path("bash")) == {}


def started(python: Path, folder: Path) -> str:
    """$CUDA_HOME of a server's process, which says it and ends."""
    folder.mkdir()
    script = f'printf %s "$CUDA_HOME" > {folder}/told'
    with pytest.raises(ProcessFailedError):
        SGLangServer(lambda _: [os.fspath(python), "-c", script], "server", Owner("tests", folder), {}, 60.0)
    return (folder / "told").read_text()
