"""`python -m infra.sglang.toolkit`, in SGLang's environment for GPUs: lays out CUDA's toolkit from its packages.

SGLang (0.5.23) compiles kernels with nvcc as it runs. NVIDIA's packages bring nvcc, headers and libraries, but these
neither in `lib64` nor under the names that a linker looks for. The driver's library is in none of them, and cuobjdump
in Triton's.
"""

import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from infra.processes.exit import run_main

FOLDER = "cuda"
"""Of SGLang's environment."""
LDCONFIG = Path("/sbin/ldconfig")
ANSWER_S = 60.0


def own_toolkit(environment: Path) -> Path | None:
    """The toolkit that `make sglang` laid out in SGLang's environment, if there is one."""
    folder = environment / FOLDER
    return folder if (folder / "bin" / "nvcc").is_file() else None


def toolkit_variables(python: Path) -> dict[str, str]:
    """Variables by which a server of this interpreter finds the toolkit that fits its torch.

    It goes before one that $CUDA_HOME names, often by a cluster's modules, and that may be for CUDA 12.
    """
    own = own_toolkit(python.parent.parent)
    return {} if own is None else {"CUDA_HOME": str(own)}


def lay_out(packages: Path, folder: Path, driver: Path, tools: Sequence[Path] = ()) -> None:
    """Make `folder` a toolkit of links into `packages`.

    `driver`: its library, which some kernels link to; `tools`: programs that are in other packages.
    """
    shutil.rmtree(folder, ignore_errors=True)
    programs, libraries = folder / "bin", folder / "lib64"
    for made in (programs, libraries / "stubs"):
        made.mkdir(parents=True)
    for name, file in {file.name: file for file in (*tools, *(packages / "bin").iterdir())}.items():
        (programs / name).symlink_to(file)
    for part in ("include", "nvvm"):
        (folder / part).symlink_to(packages / part)
    for file in sorted((packages / "lib").iterdir()):
        (libraries / file.name).symlink_to(file)
        plain = libraries / re.sub(r"\.so\..*", ".so", file.name)
        if not plain.is_symlink():
            plain.symlink_to(file)
    (libraries / "stubs" / "libcuda.so").symlink_to(driver)
    (folder / "lib").symlink_to(libraries)


def driver_library() -> Path:
    """NVIDIA's libcuda; where this machine has none, the place at which containers get it when they start."""
    if LDCONFIG.is_file():
        told = subprocess.run([LDCONFIG, "-p"], capture_output=True, text=True, timeout=ANSWER_S, check=True).stdout
        if found := re.search(r"libcuda\.so\.1 \(libc6,.* => (\S+)", told):  # without the comma: for 32 bits
            return Path(found[1])
    return Path("/usr/lib", f"{platform.machine()}-linux-gnu", "libcuda.so.1")


def main() -> None:
    packages = Path(sysconfig.get_path("purelib"))
    # DeepGEMM looks for it beside nvcc.
    disassembler = packages / "triton/backends/nvidia/bin/cuobjdump"
    lay_out(packages / "nvidia/cu13", Path(sys.prefix, FOLDER), driver_library(), [disassembler])


if __name__ == "__main__":
    run_main(main)
