"""Whether Mooncake can run here, by which protocol, and with how much memory."""

import ctypes
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from infra.config import TransportConfig
from infra.network.rdma import active_devices
from infra.refusal import Refusal

INSTALL = "pip install 'draftsmith[mooncake]' (draftsmith[mooncake-cuda] on machines with CUDA)"
SLACK = 1.5
"""Factor on the byte budget, because objects of different sizes leave gaps."""
BEYOND_BUDGET = 64 * 2**20


def check_mooncake() -> None:
    """Raise Refusal, with the remedy, where Mooncake or a library that it needs is missing."""
    if find_spec("mooncake") is None:
        raise Refusal(f"transport.kind=mooncake: Mooncake is not installed: {INSTALL}, or set transport.kind=auto")
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        raise Refusal(
            "transport.kind=mooncake: Mooncake needs libibverbs, even without RDMA: `apt install libibverbs1`, or set "
            "transport.kind=auto"
        ) from None


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
    """RDMA if a device of this machine has an active port. Raises Refusal if RDMA is required and missing."""
    there = bool(active_devices(root))
    if wanted == "rdma" and not there:
        raise Refusal(
            "transport.protocol=rdma: no RDMA device of this machine has an active port (`draftsmith doctor` lists "
            "them): set transport.protocol=auto or tcp"
        )
    return "rdma" if there and wanted != "tcp" else "tcp"


def store_bytes(config: TransportConfig) -> int:
    """Bytes of the store's segment."""
    return int(config.budget_mib * 2**20 * SLACK) + BEYOND_BUDGET
