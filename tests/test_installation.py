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
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from infra.transport.mooncake.environment import GPUDIRECT_LIBRARIES, LIBRARIES
from models.capture.sglang.plugin import HOOKED

ROOT = Path(__file__).parents[1]
RESOLVE_S = 800.0
CUDA_PACKAGES = ("nvidia-", "cuda-", "triton", "flashinfer", "sgl")
NO_CUDA = {"nvidia-ml-py"}
"""Talks to the driver, and brings no library."""
BASE = {
    *("ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1", "libc.so.6", "libdl.so.2", "libgcc_s.so.1", "libm.so.6"),
    *("libpthread.so.0", "libresolv.so.2", "librt.so.1", "libstdc++.so.6"),
}
"""In every Linux on which Python runs."""


def program(place: Path, script: str) -> Path:
    place.write_text(f"#!/bin/sh\n{script}\n")
    place.chmod(0o755)
    return place


PIP = """#!/bin/sh
echo pip "$@"
torch=${0%/bin/pip}/lib/python3.11/site-packages/torch
mkdir -p $torch
case "$*" in
    *torch===* | *$REPLACES*) cuda="'13.0'" ;;
    *torch==*+cpu*) cuda=None ;;
    *torch==*+cu126*) cuda="'12.6'" ;;
    *) exit 0 ;;
esac
echo "cuda: Optional[str] = $cuda" > $torch/version.py
"""
"""Tells what it is asked for and installs nothing of torch but the file that names its build, another one where it is
asked for $REPLACES."""


def made(
    folder: Path, target: str, told: str, *settings: str, python: str = "", **variables: str
) -> "subprocess.CompletedProcess[str]":
    """Make an environment in an empty folder; nvidia-smi tells `told`, and Python runs `python` for `-c`."""
    folder.mkdir(exist_ok=True)
    program(folder / "nvidia-smi", f"echo '{told}'")
    (folder / "pip").write_text(PIP)
    (folder / "pip").chmod(0o755)
    script = f'if [ "$1" = -c ]; then {python or ":"}; else mkdir -p "$3/bin"; cp {folder}/pip "$3/bin"; fi'
    command = ["make", "--silent", f"PYTHON={program(folder / 'python', script)}", f"{target}={folder / target}"]
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "REPLACES": "nothing", **variables}
    done = subprocess.run(
        [*command, *settings, str(folder / target / ".ready")],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (folder / target / ".ready").exists() == (done.returncode == 0), done.stderr
    return done


@pytest.mark.parametrize(
    ("told", "torch", "sglang"),
    [
        ("", "torch==2.13.0+cpu", "sglang-cpu-lock.txt"),
        ("NVIDIA-SMI has failed because it could not talk to the driver.", "torch==2.13.0+cpu", "sglang-cpu-lock.txt"),
        ("580.65.06, 9.0", "torch===2.13.0", "sglang-cuda-lock.txt"),
        ("595.10, [N/A]\n595.10, [N/A]", "torch===2.13.0", "sglang-cuda-lock.txt"),
        ("550.54.15, 9.0", "torch==2.13.0+cu126", "SGLang needs CUDA 13: update NVIDIA's driver 550 to 580"),
        ("580.65.06, 6.1\n580.65.06, 8.0", "torch===2.13.0", "sglang-cuda-lock.txt"),
        ("580.65.06, 7.0", "torch==2.13.0+cu126", "SGLang needs CUDA 13: it has no code for this GPU"),
        ("570.133.07, 12.0", "driver 570 is older than 580", "update NVIDIA's driver 570 to 580"),
        ("not a valid field\n470.256.02", "driver 470 is older than 525", "update NVIDIA's driver 470 to 580"),
    ],
)
def test_wheels_are_chosen_by_driver_and_gpu(tmp_path: Path, told: str, torch: str, sglang: str) -> None:
    done, engine = made(tmp_path, "VENV", told), made(tmp_path, "SGLANG", told).stdout
    main = done.stdout
    assert sglang in engine
    assert (done.returncode != 0) == ("driver" in torch)
    if done.returncode:
        assert torch in main
        return
    assert f"pip install --quiet --no-deps {torch}" in main
    assert "ray,mooncake]" in main
    assert ("index" in main) == (torch != "torch===2.13.0")


def test_a_build_for_cuda_12_is_installed_under_a_lock_without_cuda_13(tmp_path: Path) -> None:
    assert f"--constraint {tmp_path}/VENV/lock.txt" in made(tmp_path, "VENV", "550.54.15, 9.0").stdout
    chosen, whole = locked(str(tmp_path / "VENV/lock.txt")), locked("lock.txt")
    left_out = set(whole) - set(chosen)
    assert left_out == {name for name in whole if name.startswith(("nvidia-", "cuda-"))} - NO_CUDA
    assert chosen == {name: whole[name] for name in set(whole) - left_out} | {"torch": "2.13.0+cu126"}


def test_an_installation_that_replaced_torchs_build_is_refused(tmp_path: Path) -> None:
    done = made(tmp_path, "VENV", "550.54.15, 9.0", REPLACES="quickstart")
    assert done.returncode != 0
    assert f"torch in {tmp_path}/VENV is not the build cu126" in done.stdout


@pytest.mark.parametrize(
    ("target", "settings", "python", "said"),
    [
        ("VENV", ["WHEELS=cpu"], 'case "$2" in *28*) exit 1 ;; esac', "torch needs glibc 2.28"),
        ("SGLANG", ["WHEELS=cpu"], 'case "$2" in *34*) exit 1 ;; esac', "SGLang needs glibc 2.34"),
        ("SGLANG", ["WHEELS=cu126"], ":", "leave WHEELS=cu126 out"),
        ("SGLANG", ["WHEELS=cu130"], "exit 1", "install 3.12, then make sglang PYTHON=python3.12"),
        ("VENV", ["WHEELS=cu126", "GPUDIRECT=1"], ":", "GPUDIRECT=1 needs CUDA 13"),
    ],
)
def test_what_has_no_wheels_is_refused(
    tmp_path: Path, target: str, settings: list[str], python: str, said: str
) -> None:
    done = made(tmp_path, target, "580.65.06, 9.0", *settings, python=python)
    assert done.returncode != 0
    assert said in done.stdout


@pytest.mark.parametrize(("version", "status"), [("2.28", 0), ("2.9", 1), ("2.100", 0), ("", 1)])
def test_the_version_of_glibc_is_compared_as_numbers(tmp_path: Path, version: str, status: int) -> None:
    """By the program of the Makefile, in a Python whose platform is this one."""
    (tmp_path / "platform.py").write_text(f"def libc_ver(): return {('glibc' if version else '', version)}")
    python = f'PYTHONPATH={tmp_path} {sys.executable} "$@"'
    assert made(tmp_path, "VENV", "", "WHEELS=cpu", python=python).returncode == 2 * status


@pytest.mark.parametrize(
    ("kind", "has_amd_gpu", "driver", "said"),
    [
        ("x86_64", False, "", ""),
        ("x86_64", True, "", "cannot use this machine's AMD GPU: it computes on the CPU."),
        ("x86_64", True, "580.65.06", ""),
        ("aarch64", False, "", "untested on a processor like this one (aarch64)"),
    ],
)
def test_what_draftsmith_does_not_use_is_told(
    tmp_path: Path, kind: str, has_amd_gpu: bool, driver: str, said: str
) -> None:
    kfd = tmp_path / "kfd"
    if has_amd_gpu:
        kfd.touch()
    program(tmp_path / "nvidia-smi", f"echo '{driver}'")
    program(tmp_path / "uname", f"[ $1 = -s ] && echo Linux || echo {kind}")
    python = program(tmp_path / "python", '[ "$1" = -c ] || exit 3')
    command = ["make", "--silent", f"PYTHON={python}", f"KFD={kfd}", f"VENV={tmp_path}/main", f"{tmp_path}/main/.ready"]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert bool(done.stdout) == bool(said)
    assert said in done.stdout


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
    """Versions that a file of requirements/ names for a machine like this one."""
    lines = (ROOT / "requirements" / file).read_text().splitlines()
    named = (Requirement(line) for line in lines if "==" in line and not line.startswith("#"))
    fitting = (one for one in named if one.marker is None or one.marker.evaluate())
    return {canonicalize_name(one.name): str(one.specifier).removeprefix("==") for one in fitting}


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


CUDA12 = """Metadata-Version: 2.1
Name: torch
Version: 2.13.0+cu126
Requires-Dist: cuda-toolkit[cudart]==12.6.3
Requires-Dist: cuda-bindings>=12.9.4,<13
Requires-Dist: nvidia-cudnn-cu12==9.10.2.21
Requires-Dist: triton==3.7.1
"""
"""Of a torch for CUDA 12: what it pins, in part."""


@pytest.mark.registry
def test_a_torch_for_cuda_12_is_not_replaced_by_the_registrys(tmp_path: Path) -> None:
    assert made(tmp_path / "make", "VENV", "550.54.15, 9.0").returncode == 0
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "empty")], check=True, timeout=300)
    (packages,) = (tmp_path / "empty").glob("lib/python3*/site-packages")
    (packages / "torch-2.13.0+cu126.dist-info").mkdir()
    (packages / "torch-2.13.0+cu126.dist-info/METADATA").write_text(CUDA12)
    uv = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--dry-run", f"--python={tmp_path}/empty"]
    wanted = ["--constraint", f"{tmp_path}/make/VENV/lock.txt", ".[quickstart,dev,ray,mooncake]"]
    done = subprocess.run([*uv, *wanted], cwd=ROOT, check=True, capture_output=True, text=True, timeout=RESOLVE_S)
    assert "+ cuda-toolkit==12.6.3" in done.stderr
    assert " torch==" not in done.stderr


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
