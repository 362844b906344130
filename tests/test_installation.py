"""What is installed fits the machine: wheels by the driver, nothing of CUDA without GPUs, libraries that load."""

import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from elftools.elf.elffile import ELFFile
from packaging.utils import canonicalize_name

from infra.transport.mooncake.environment import GPUDIRECT_LIBRARIES, LIBRARIES
from models.capture.sglang.plugin import HOOKED

ROOT = Path(__file__).parents[1]
RESOLVE_S = 800.0
CUDA_PACKAGES = ("nvidia-", "cuda-", "triton", "flashinfer", "sgl")
NO_CUDA = {"nvidia-ml-py"}
"""Talks to the driver, and brings no library."""
BASE = {
    *("ld-linux-x86-64.so.2", "libc.so.6", "libdl.so.2", "libgcc_s.so.1", "libm.so.6", "libpthread.so.0"),
    *("libresolv.so.2", "librt.so.1", "libstdc++.so.6"),
}
"""In every Linux on which Python runs."""


def program(place: Path, script: str) -> Path:
    place.write_text(f"#!/bin/sh\n{script}\n")
    place.chmod(0o755)
    return place


@pytest.mark.parametrize(
    ("told", "torch", "sglang"),
    [
        ("", "torch==2.13.0+cpu", "sglang-cpu-lock.txt"),
        ("NVIDIA-SMI has failed because it could not talk to the driver.", "torch==2.13.0+cpu", "sglang-cpu-lock.txt"),
        ("580.65.06", "torch===2.13.0", "sglang-cuda-lock.txt"),
        ("595.10\n595.10", "torch===2.13.0", "sglang-cuda-lock.txt"),
        ("550.54.15", "torch==2.13.0+cu126", ""),
        ("470.256.02", "", ""),
    ],
)
def test_wheels_are_chosen_by_the_driver(tmp_path: Path, told: str, torch: str, sglang: str) -> None:
    """Both environments are made in an empty folder, by a Python and a pip that only tell what they were asked for."""
    program(tmp_path / "nvidia-smi", f"echo '{told}'")
    makes = 'mkdir -p "$3/bin"; echo "echo pip \\"\\$@\\"" > "$3/bin/pip"; chmod +x "$3/bin/pip"'
    python = program(tmp_path / "python", f'[ "$1" = -c ] || {{ {makes}; }}')
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def made(name: str, place: Path) -> str:
        command = ["make", "--silent", f"PYTHON={python}", f"{name}={place}", str(place / ".ready")]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert (place / ".ready").exists() == (done.returncode == 0)
        return done.stdout

    main, engine = made("VENV", tmp_path / "main"), made("SGLANG", tmp_path / "sglang")
    if not torch:
        assert "driver 470 is older than 525" in main
    else:
        assert f"pip install --quiet --no-deps {torch}" in main
        assert "ray,mooncake]" in main
        assert ("index" in main) == (torch != "torch===2.13.0")
    if sglang:
        assert sglang in engine
    else:
        assert "SGLang needs CUDA 13" in engine


def wanted(tmp_path: Path, there: dict[str, int]) -> "subprocess.CompletedProcess[str]":
    """What `make` would do where these Pythons are on the path: each ends with this status whatever it is asked."""
    path = tmp_path / "path"
    path.mkdir()
    for name, status in there.items():
        program(path / name, f"exit {status}")
    for tool in ("sh", "bash", "sed", "make", "uname"):
        (path / tool).symlink_to(shutil.which(tool) or "")
    command = ["make", "--dry-run", f"VENV={tmp_path}/main", f"{tmp_path}/main/.ready"]
    environment = {"PATH": str(path), "HOME": str(tmp_path)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.parametrize(
    ("there", "chosen"),
    [
        ({"python3": 0}, "python3"),
        ({"python3": 0, "python3.13": 0}, "python3.13"),
        ({"python3.13": 0, "python3.12": 0}, "python3.12"),
        ({"python3.13": 0, "python3.12": 0, "python3.11": 0}, "python3.11"),
        ({"python3.11": 127, "python3.12": 0, "python3": 0}, "python3.12"),  # pyenv's, which is not chosen
    ],
)
def test_any_python_that_the_machine_has_will_do(tmp_path: Path, there: dict[str, int], chosen: str) -> None:
    done = wanted(tmp_path, there)
    assert done.returncode == 0, done.stderr
    assert f"\n{chosen} -m venv {tmp_path}/main\n" in done.stdout


@pytest.mark.parametrize("there", [{}, {"python3": 1}])  # 3.10 or 3.14
def test_a_machine_without_a_fitting_python_says_so(tmp_path: Path, there: dict[str, int]) -> None:
    done = wanted(tmp_path, there)
    assert done.returncode != 0
    assert "Draftsmith needs Python 3.11, 3.12 or 3.13: install one" in done.stderr


def test_another_system_than_linux_is_refused_at_once(tmp_path: Path) -> None:
    program(tmp_path / "uname", "echo Darwin")
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["make", "--dry-run", "quickstart"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode != 0
    assert "Draftsmith runs on Linux: on Windows use WSL 2, on a Mac a container" in done.stderr


def test_sglang_for_gpus_is_refused_to_a_python_for_which_its_pins_have_no_wheels(tmp_path: Path) -> None:
    python = program(tmp_path / "python", "exit 1")
    command = ["make", "--silent", f"PYTHON={python}", "WHEELS=cu130", f"SGLANG={tmp_path}", f"{tmp_path}/.ready"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode != 0
    assert "install 3.12, then make sglang PYTHON=python3.12" in done.stdout


def resolve(folder: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    """What pip would install into an empty environment: its report's entries by package name."""
    report = folder / "report.json"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", f"--report={report}"]
    subprocess.run([*pip, *arguments], cwd=ROOT, check=True, timeout=RESOLVE_S)
    return {canonicalize_name(one["metadata"]["name"]): one for one in json.loads(report.read_text())["install"]}


def versions(report: dict[str, dict[str, Any]]) -> dict[str, str]:
    return {name: one["metadata"]["version"] for name, one in report.items()}


def of_cuda(report: dict[str, dict[str, Any]]) -> set[str]:
    return {name for name in report if name.startswith(CUDA_PACKAGES)} - NO_CUDA


def locked(file: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / file).read_text().splitlines()
    pairs = (line.partition(" ")[0].split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, version in pairs}


def needed(folder: Path, requirement: str) -> set[str]:
    """Libraries that the store and the master of a Mooncake wheel need, beside those that the wheel brings."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"--dest={folder}", requirement]
    subprocess.run(pip, check=True, timeout=RESOLVE_S)
    wheel = zipfile.ZipFile(next(folder.glob("*.whl")))
    libraries = {
        Path(name).name: name for name in wheel.namelist() if ".so" in name or name.endswith("/mooncake_master")
    }
    found: set[str] = set()
    left = ["store.so", "mooncake_master"]
    while left:
        elf = ELFFile(io.BytesIO(wheel.read(libraries[left.pop()])))
        names = {tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")} - found
        found |= names
        left += names & libraries.keys()
    return found - libraries.keys() - BASE


@pytest.mark.registry
def test_a_machine_without_gpus_gets_nothing_of_cuda(tmp_path: Path) -> None:
    constraint = ("--constraint", "requirements/lock.txt")
    report = resolve(tmp_path, *constraint, "torch==2.13.0+cpu", ".[quickstart,dev,ray,mooncake]")
    assert report["torch"]["metadata"]["version"] == "2.13.0+cpu"
    assert of_cuda(report) == set()
    assert needed(
        tmp_path, f"mooncake-transfer-engine-non-cuda=={versions(report)['mooncake-transfer-engine-non-cuda']}"
    ) == set(LIBRARIES)


@pytest.mark.registry
def test_torch_and_mooncake_for_gpudirect_share_one_cuda_runtime(tmp_path: Path) -> None:
    report = resolve(tmp_path, "--constraint", "requirements/lock.txt", "torch===2.13.0", ".[mooncake-gpudirect]")
    mooncake = versions(report)["mooncake-transfer-engine-cuda13"]
    assert mooncake == locked("lock.txt")["mooncake-transfer-engine-non-cuda"]  # clients of both talk to one store
    libraries = needed(tmp_path, f"mooncake-transfer-engine-cuda13=={mooncake}")
    assert libraries == {*LIBRARIES, *GPUDIRECT_LIBRARIES, "libcudart.so.13"}
    assert versions(report)["nvidia-cuda-runtime"].startswith("13.")


@pytest.mark.registry
def test_sglang_on_gpus_is_installed_as_locked_with_mooncake_for_host_memory(tmp_path: Path) -> None:
    constraint = ("--constraint", "requirements/sglang-cuda-lock.txt")
    report = resolve(tmp_path, *constraint, "--requirement", "requirements/sglang-cuda.txt")
    assert versions(report) == locked("sglang-cuda-lock.txt")
    chosen, main = locked("sglang-cuda-lock.txt"), locked("lock.txt")
    assert chosen["mooncake-transfer-engine-non-cuda"] == main["mooncake-transfer-engine-non-cuda"]
    assert chosen["nvidia-cuda-runtime"] == main["nvidia-cuda-runtime"]
    assert {"ninja", "nvidia-ml-py", "xxhash"} <= report.keys()


def test_sglang_has_one_version_wherever_it_is_named() -> None:
    """Its internals are hooked."""
    named = {locked(file)["sglang"] for file in ("sglang-cuda.txt", "sglang-cuda-lock.txt", "sglang-cpu-no-deps.txt")}
    assert named == {HOOKED}
