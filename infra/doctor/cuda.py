"""Probes of what GPUs need beside their driver: builds of torch that fit them, and compilers for SGLang's kernels.

There are no findings on machines without GPUs. `root` stands for `/`.
"""

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from sysconfig import get_path

from infra.doctor.finding import Finding, judge
from infra.doctor.software import installed
from infra.pools.gpus import Gpus
from infra.processes.process import EXCEPTION
from infra.quantities import plural
from infra.settings import c_compiler, cuda_home
from infra.sglang.toolkit import own_toolkit

CAPABILITIES = {12: ((5, 0), (9, 0)), 13: ((7, 5), (12, 1))}
"""By CUDA major version: compute capabilities that torch's wheels hold code for (github.com/pytorch/pytorch/pull/175253
for 2.11; 2.13 has the same for CUDA 12.6 and 13.0)."""
BFLOAT16 = (8, 0)
"""Compute capability from which on GPUs compute in bfloat16."""
WITHOUT_BFLOAT16 = (
    "training.precision=float32",
    "generator.compute_dtype=float32",
    "benchmark.compute_dtype=float32",
    "generator.engine=transformers",
)
"""With these a run needs none: SGLang's attention takes half precision only."""
USE_S = 120.0
USE = """
import torch
count = torch.cuda.device_count()
assert count, "torch sees no GPU"
for index in range(count):
    print(index, flush=True)
    assert float(torch.ones(4, device=f"cuda:{index}").sum()) == 4.0
print(count)
"""
"""Imports torch in a process of its own, since nothing of it is needed here. Prints each GPU's index before it is used,
and their number at the end."""


def version_file() -> Path | None:
    """This environment's `torch/version.py`, without importing torch."""
    spec = find_spec("torch")
    return Path(spec.origin).with_name("version.py") if spec and spec.origin else None


def torch_build(version: str | None, inventory: Gpus | None, file: Path | None) -> Finding | list[Finding]:
    """Whether torch's build fits the machine, by its `version.py`."""
    if version is None or file is None:
        return []  # the check of packages says that it is missing
    cuda, num_gpus = _cuda(file), len(inventory.gpus) if inventory else 0
    rocm = re.search(r"^hip\b[^=]*= *'", file.read_text(), re.MULTILINE)
    found = f"{version}, {f'CUDA {cuda}' if cuda else 'ROCm' if rocm else 'CPU only'}"
    if cuda is None and num_gpus:
        return judge(f"{found}, and this machine has {plural(num_gpus, 'GPU')}", problem=True)
    if cuda is not None and inventory and num_gpus and cuda > inventory.cuda:
        return judge(f"{found}, and the driver supports CUDA up to {inventory.cuda}", problem=True)
    if cuda is not None and not num_gpus:
        return judge(f"{found}, on a machine without GPUs: the CPU build is gigabytes smaller", note=True)
    return judge(found)


def _cuda(file: Path) -> int | None:
    """CUDA's major version in a `torch/version.py`; None for a build without CUDA."""
    built = re.search(r"^cuda\b[^=]*= *'(\d+)", file.read_text(), re.MULTILINE)
    return int(built[1]) if built else None


def capabilities(inventory: Gpus | None, file: Path | None) -> list[Finding]:
    """Whether torch's build holds code for the GPUs, and whether they compute in bfloat16; `file`: its `version.py`."""
    built = _cuda(file) if file else None
    if inventory is None or built not in CAPABILITIES:
        return []
    least, most = CAPABILITIES[built]
    findings = []
    for index, gpu in enumerate(inventory.gpus):
        shown = f"{gpu.capability[0]}.{gpu.capability[1]}"
        name, fits = f"compute capability {index}", least <= gpu.capability <= most
        if not fits:
            remedy = "the build for CUDA 12 knows older GPUs, that for CUDA 13 newer ones: "
            remedy += "" if gpu.capability < least or inventory.cuda >= 13 else "update NVIDIA's driver to 580, "
            remedy += f"`make clean`, then `make WHEELS={'cu126' if gpu.capability < least else 'cu130'} quickstart`"
            has = f"{least[0]}.{least[1]} to {most[0]}.{most[1]}"
            findings.append(judge(f"{shown}; torch's build has {has}", problem=True, name=name, remedy=remedy))
        elif gpu.capability < BFLOAT16:
            found = f"{shown}: no bfloat16 arithmetic, in which runs on GPUs compute by default"
            only = all(other.capability < BFLOAT16 for other in inventory.gpus)
            remedy = f"give runs {' '.join(WITHOUT_BFLOAT16)}"
            remedy += "" if only else ", or leave this one out (DRAFTSMITH_GPUS)"
            findings.append(judge(found, problem=only, note=not only, name=name, remedy=remedy))
        else:
            findings.append(judge(shown, name=name))
    return findings


def torch_works(inventory: Gpus | None, python: Path = Path(sys.executable)) -> Finding | list[Finding]:
    """Whether the torch of an environment computes on all GPUs that it sees; the first one that fails is named."""
    if inventory is None or not inventory.devices:
        return []
    try:
        done = subprocess.run([str(python), "-c", USE], capture_output=True, text=True, timeout=USE_S, check=False)
    except subprocess.TimeoutExpired:
        return judge(f"no answer from a GPU within {USE_S:g} s", problem=True)
    tried = done.stdout.split()
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["it said nothing"]
        # Errors of CUDA end with advice for programmers.
        cause = next(filter(EXCEPTION.match, said), said[-1])
        where = f"cuda:{tried[-1]}" if tried else "them"
        return judge(f"torch cannot compute on {where}: {cause}", problem=True)
    return judge(f"torch computes on {plural(int(tried[-1]), 'GPU')}")


def kernel_builds(inventory: Gpus | None, root: Path = Path("/")) -> Finding | list[Finding]:
    """Whether Triton can compile: it links a small module of its own in C before it launches the first kernel."""
    if inventory is None or not inventory.gpus:
        return []
    named = c_compiler()
    wanted = [named] if named else ["gcc", "clang"]
    compiler = next(filter(None, map(shutil.which, wanted)), None)
    header = root / Path(get_path("include", "posix_prefix")).relative_to("/") / "Python.h"
    missing = [] if compiler else [f"a C compiler ({' or '.join(wanted)})"]
    missing += [] if header.is_file() else [str(header)]
    return judge(f"missing: {' and '.join(missing)}" if missing else str(compiler), problem=bool(missing))


def sglang_environment(environment: Path, inventory: Gpus | None, root: Path = Path("/")) -> list[Finding]:
    """Whether SGLang's environment fits the GPUs: its build of torch, and what compiles its kernels at run time."""
    packages = next(environment.glob("lib/python3*/site-packages"), None)
    if inventory is None or not inventory.gpus or packages is None:
        return []
    version = installed([str(packages)]).get("torch")
    build = torch_build(version, inventory, packages / "torch" / "version.py") if version else []
    findings = [one.named("SGLang's torch", "") for one in (build if isinstance(build, list) else [build])]
    missing = [
        what
        for what, there in (
            ("ninja (pip install ninja, in that environment)", _has_ninja(environment)),
            ("a C++ compiler (Debian: apt install g++)", shutil.which("c++") is not None),
        )
        if not there
    ]
    if missing:
        findings.append(judge(f"missing: {'; '.join(missing)}", problem=True, name="SGLang's build tools"))
    built = _cuda(packages / "torch" / "version.py") if version else None
    return [*findings, _nvcc(environment, built, inventory, root)]


def _has_ninja(environment: Path) -> bool:
    return (environment / "bin" / "ninja").is_file() or shutil.which("ninja") is not None


def _nvcc(environment: Path, built: int | None, inventory: Gpus, root: Path) -> Finding:
    """CUDA's compiler, looked for as a server does: its environment, $CUDA_HOME or $CUDA_PATH, $PATH, /usr/local/cuda.

    `built`: CUDA's major version that the environment's torch is for.
    """
    on_path = shutil.which("nvcc")
    other = Path(on_path).parents[1] if on_path else root / "usr/local/cuda"
    nvcc = (own_toolkit(environment) or cuda_home() or other) / "bin" / "nvcc"
    if not os.access(nvcc, os.X_OK):
        return judge(f"no nvcc in {nvcc.parent}", problem=True, name="CUDA compiler")
    told = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, timeout=USE_S, check=False).stdout
    release = re.search(r"release (\d+)\.(\d+)", told)
    if release is None:
        return judge(f"{nvcc} does not tell its version", problem=True, name="CUDA compiler")
    found = f"{nvcc}, CUDA {release[1]}.{release[2]}"
    if int(release[1]) > inventory.cuda:
        return judge(f"{found}; the driver runs CUDA up to {inventory.cuda}", problem=True, name="CUDA compiler")
    if built is not None and int(release[1]) != built:
        return judge(f"{found}; SGLang's torch is built for CUDA {built}", problem=True, name="CUDA compiler")
    return judge(found, name="CUDA compiler")
