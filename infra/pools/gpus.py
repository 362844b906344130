"""This machine's GPUs, by NVML: the one file that calls it.

Where there is no driver there are no GPUs. Raises pynvml.NVMLError for what a driver cannot say.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

from infra.network.rdma import nearest_devices, numa_node
from infra.quantities import byte_size

UNSEEN_BYTES = 2**30
"""More than a driver keeps for itself on an idle GPU."""
PCIE = {
    pynvml.NVML_TOPOLOGY_INTERNAL: "one board",
    pynvml.NVML_TOPOLOGY_SINGLE: "one PCIe switch",
    pynvml.NVML_TOPOLOGY_MULTIPLE: "PCIe switches",
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "the CPU's PCIe bridge",
    pynvml.NVML_TOPOLOGY_NODE: "the NUMA node",
    pynvml.NVML_TOPOLOGY_SYSTEM: "other NUMA nodes",
}
NVLINK = "NVLink"


@dataclass(frozen=True)
class Gpu:
    """One GPU as NVML sees it; sizes in bytes."""

    name: str
    total: int
    free: int
    others: tuple[tuple[int, int], ...] = ()
    """(process id, bytes held) of processes that compute on it; bytes are 0 where the driver does not say."""
    mig: bool = False
    uuid: str = ""
    pci: str = ""
    """PCI address as the kernel writes it: `0000:18:00.0`."""
    numa: str = ""
    """NUMA node, if the machine has several."""
    nics: tuple[str, ...] = ()
    """The nearest RDMA devices that have a link."""
    links: tuple[str, ...] = ()
    """Connection to each GPU of this machine, in their order: NVLink, or the PCIe path; empty for itself."""

    @property
    def held(self) -> str | None:
        """Other processes that use it, as text; None if idle."""
        if self.others:
            return ", ".join(
                f"process {pid}" + (f" ({byte_size(size)})" if size else "") for pid, size in self.others[:4]
            )
        if self.total - self.free > UNSEEN_BYTES:
            return f"processes that cannot be seen from here ({byte_size(self.total - self.free)})"
        return None


@dataclass(frozen=True)
class Gpus:
    """The GPUs of this machine and their driver."""

    gpus: tuple[Gpu, ...]
    driver: str
    cuda: int
    """Highest CUDA major version that the driver supports."""


@contextmanager
def _nvml() -> Iterator[list[Any]]:
    """Handles of all GPUs."""
    pynvml.nvmlInit()
    try:
        yield [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()


def visible_gpus() -> tuple[str, ...]:
    """UUIDs of this machine's GPUs; empty without a working driver."""
    try:
        with _nvml() as handles:
            return tuple(str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles)
    except pynvml.NVMLError:
        return ()


def pci_addresses(gpus: Sequence[str]) -> list[str]:
    """PCI addresses of GPUs (UUIDs). Raises pynvml.NVMLError for a lost one."""
    if not gpus:
        return []
    with _nvml():
        return [_pci(pynvml.nvmlDeviceGetHandleByUUID(gpu)) for gpu in gpus]


def read_gpus(root: Path = Path("/")) -> Gpus | None:
    """The inventory; None without a driver."""
    try:
        with _nvml() as handles:
            driver, cuda = pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlSystemGetCudaDriverVersion_v2() // 1000
            return Gpus(tuple(_read_gpu(handle, handles, root) for handle in handles), str(driver), int(cuda))
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):  # pyright: ignore[reportAttributeAccessIssue]
        return None


def _read_gpu(handle: Any, handles: Sequence[Any], root: Path) -> Gpu:
    memory, pci = pynvml.nvmlDeviceGetMemoryInfo(handle), _pci(handle)
    try:
        mig = pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    except pynvml.NVMLError_NotSupported:  # pyright: ignore[reportAttributeAccessIssue]
        mig = False
    try:
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_NoPermission):  # pyright: ignore[reportAttributeAccessIssue]
        processes = []
    return Gpu(
        name=str(pynvml.nvmlDeviceGetName(handle)),
        total=int(memory.total),
        free=int(memory.free),
        others=tuple((int(one.pid), int(one.usedGpuMemory or 0)) for one in processes if one.pid != os.getpid()),
        mig=mig,
        uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
        pci=pci,
        numa=numa_node(root / "sys/bus/pci/devices" / pci).replace("-1", ""),
        nics=tuple(nearest_devices([pci], root)),
        links=tuple("" if handle is other else _link(handle, other) for other in handles),
    )


def _link(one: Any, other: Any) -> str:
    try:
        if pynvml.nvmlDeviceGetP2PStatus(one, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK) == pynvml.NVML_P2P_STATUS_OK:
            return NVLINK
        return PCIE[pynvml.nvmlDeviceGetTopologyCommonAncestor(one, other)]
    except pynvml.NVMLError_NotSupported:  # pyright: ignore[reportAttributeAccessIssue]
        return "an unknown way"


def _pci(handle: Any) -> str:
    # NVML writes the domain with eight digits, the kernel with four.
    return str(pynvml.nvmlDeviceGetPciInfo(handle).busId).lower()[-12:]
