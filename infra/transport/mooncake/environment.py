"""Whether Mooncake can run here, by which protocol, and with how much memory."""

import ctypes
import os
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from infra.network.rdma import active_devices
from infra.refusal import Refusal

INSTALL = (
    "pip install --editable '.[mooncake]' in the project's folder (for GPUDirect: '.[mooncake-gpudirect]', CUDA 13)"
)
LIBRARIES = {"libibverbs.so.1": "libibverbs1", "libnuma.so.1": "libnuma1", "libcurl.so.4": "libcurl4"}
"""Of the system, with Debian's packages: needed even without RDMA."""
GPUDIRECT_LIBRARIES = {"libmlx5.so.1": "ibverbs-providers", "libcuda.so.1": "NVIDIA's driver"}
SLACK = 1.5
"""Factor on the byte budget, because objects of different sizes leave gaps."""
BEYOND_BUDGET = 64 * 2**20


def carries_gpu_memory() -> bool:
    """Whether the installed Mooncake is the build for CUDA 13. The others crash on a GPU's addresses."""
    return any(metadata.distributions(name="mooncake-transfer-engine-cuda13"))


def check_mooncake() -> None:
    """Raise Refusal, with the remedy, where Mooncake or a library that it needs is missing.

    The build for CUDA 13 needs a libcudart.so.13 that is loaded already: that of torch's own dependencies, where torch
    itself is not imported.
    """
    if find_spec("mooncake") is None:
        raise Refusal(f"transport.kind=mooncake: Mooncake is not installed: {INSTALL}, or set transport.kind=auto")
    libraries, cuda = LIBRARIES, carries_gpu_memory()
    if cuda:
        libraries = libraries | GPUDIRECT_LIBRARIES | {_cuda_runtime(): "pip install nvidia-cuda-runtime==13.0.*"}
    missing = [f"{name} ({source})" for name, source in libraries.items() if not _loads(name)]
    if missing:
        raise Refusal(
            f"transport.kind=mooncake: Mooncake needs {', '.join(missing)}: install {'them' if missing[1:] else 'it'}, "
            "or set transport.kind=auto"
        )


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _cuda_runtime() -> str:
    """The libcudart of this environment, or its bare name."""
    spec = find_spec("nvidia")
    folders = map(Path, spec.submodule_search_locations or ()) if spec else ()
    files = (folder / "cu13" / "lib" / "libcudart.so.13" for folder in folders)
    return next((str(file) for file in files if file.is_file()), "libcudart.so.13")


def master_program() -> Path:
    """Mooncake's master, which its package carries without the right to run it."""
    spec = find_spec("mooncake")
    assert spec is not None, "checked before"
    assert spec.origin is not None
    program = Path(spec.origin).with_name("mooncake_master")
    if not os.access(program, os.X_OK):
        program.chmod(0o755)
    return program


def choose_protocol(wanted: Literal["auto", "rdma", "tcp"], root: Path = Path("/")) -> Literal["rdma", "tcp"]:
    """RDMA if this machine has a device that can be used. Raises Refusal if RDMA is required and missing."""
    there = bool(active_devices(root))
    if wanted == "rdma" and not there:
        raise Refusal(
            "transport.protocol=rdma: no RDMA device of this machine has an active port and can be opened "
            "(`draftsmith doctor` lists them): set transport.protocol=auto or tcp"
        )
    return "rdma" if there and wanted != "tcp" else "tcp"


def store_bytes(budget: int, parts: int = 1) -> int:
    """Bytes of each of the store's parts, for `budget` bytes of samples."""
    return int(budget * SLACK) // parts + BEYOND_BUDGET
