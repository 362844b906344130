"""This machine's GPUs, by NVML: the one file that calls it.

Where there is no driver there are no GPUs. Raises pynvml.NVMLError for what a driver cannot say.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

from infra.network.rdma import nearest_devices, numa_node
from infra.quantities import byte_size
from infra.settings import ignored_gpu_bytes, visible_devices

UNSEEN_BYTES = 2**30
"""More than a display takes on an idle GPU."""


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
    numa: str = ""
    """NUMA node, if the machine has several."""
    nics: tuple[str, ...] = ()
    """The nearest RDMA devices that have a link."""
    links: tuple[int, ...] = ()
    """Positions of the GPUs of this machine that it reaches by NVLink."""
    reserved: int = 0
    """What the driver and the firmware keep for themselves."""
    slices: tuple["Gpu", ...] = ()
    """Its MIG devices, which are leased in its place."""
    capability: tuple[int, int] = (0, 0)
    """Compute capability, (major, minor)."""

    @property
    def held(self) -> str | None:
        """Other processes that use it, as text; None if idle, or if they hold no more than the operator ignores."""
        ignored, used = ignored_gpu_bytes(), self.total - self.free - self.reserved
        if ignored is not None and used <= ignored:
            return None
        if self.others:
            return ", ".join(
                f"process {pid}" + (f" ({byte_size(size)})" if size else "") for pid, size in self.others[:4]
            )
        if used > UNSEEN_BYTES or ignored is not None:
            return f"processes that cannot be seen from here ({byte_size(used)})"
        return None


@dataclass(frozen=True)
class Gpus:
    """The GPUs of this machine and their driver."""

    gpus: tuple[Gpu, ...]
    driver: str
    cuda: int
    """Highest CUDA major version that the driver supports."""
    lost: tuple[int, ...] = ()
    """Positions of GPUs that do not answer, among all in PCI order."""

    @property
    def devices(self) -> tuple[Gpu, ...]:
        """What can be leased: whole GPUs, and the slices of those that MIG divides."""
        return tuple(device for gpu in self.gpus for device in gpu.slices or (gpu,))


LOST = (pynvml.NVMLError_GpuIsLost, pynvml.NVMLError_Unknown)  # pyright: ignore[reportAttributeAccessIssue]
"""What NVML says of one GPU that has fallen off the bus. The others still work."""


@contextmanager
def _nvml() -> Iterator[list[Any]]:
    """Handles of all GPUs that this process may use, in the order of their PCI addresses; None for a lost one.

    Raises pynvml.NVMLError without a working driver, and where all GPUs are lost.
    """
    pynvml.nvmlInit()
    try:
        handles = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            with suppress(pynvml.NVMLError_NoPermission):  # pyright: ignore[reportAttributeAccessIssue]
                handles.append(_handle(index))  # not one that a control group hides
        _refuse_none_left(handles)
        yield handles
    finally:
        pynvml.nvmlShutdown()


def _handle(index: int) -> Any:
    """None for a GPU that is lost, which takes its place so that the positions of the others stay."""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        pynvml.nvmlDeviceGetUUID(handle)  # some drivers hand out the handle of a GPU that answers nothing more
        return handle
    except LOST:
        return None


def _working(answers: Sequence[Any]) -> list[Any]:
    return [answer for answer in answers if answer is not None]


def _refuse_none_left(answers: Sequence[Any]) -> None:
    if answers and not _working(answers):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)


def visible_gpus() -> tuple[str, ...]:
    """UUIDs of the GPUs and MIG slices that $CUDA_VISIBLE_DEVICES leaves; empty without a working driver."""
    names = visible_devices()
    try:
        with _nvml() as handles:
            if names is None:
                devices = [device for handle in _working(handles) for device in _slices(handle) or [handle]]
            else:
                devices = _resolve(names, handles)
            return tuple(str(pynvml.nvmlDeviceGetUUID(device)) for device in devices)
    except pynvml.NVMLError:
        return ()


def named_by_position(names: Sequence[str]) -> dict[str, str]:
    """Environment that names whole GPUs by their positions in PCI order, for programs that read numbers alone.

    Empty where a name is that of a MIG slice, and where GPUs are lost or hidden from this process: positions could
    differ.
    """
    try:
        with _nvml() as handles:
            uuids = [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in _working(handles)]
            hidden = len(uuids) < pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError:
        return {}
    if hidden or not names or not set(names) <= set(uuids):
        return {}
    positions = ",".join(str(uuids.index(name)) for name in names)
    return {"CUDA_VISIBLE_DEVICES": positions, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def pci_addresses(names: Sequence[str]) -> list[str]:
    """PCI addresses of GPUs named as in $CUDA_VISIBLE_DEVICES. Raises pynvml.NVMLError for one that is not there."""
    if not names:
        return []
    with _nvml() as handles:
        devices = _resolve(names, handles)
        if len(devices) < len(names):
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return [_pci(device) for device in devices]


def busy_shares(names: Sequence[str]) -> list[float]:
    """The share of the last moments in which a kernel ran on each GPU, named as in $CUDA_VISIBLE_DEVICES.

    Raises pynvml.NVMLError for what the driver does not count, such as a MIG slice.
    """
    with _nvml() as handles:
        return [int(pynvml.nvmlDeviceGetUtilizationRates(device).gpu) / 100 for device in _resolve(names, handles)]


def _resolve(names: Sequence[str], handles: Sequence[Any]) -> list[Any]:
    """The devices of a list such as $CUDA_VISIBLE_DEVICES, up to the first name that is not one, as CUDA reads it.

    A name is a position (Ray, Slurm), counted in PCI order, or a UUID of a GPU or a MIG slice, or its beginning.
    Positions of lost GPUs are left out.
    """
    named = (device for handle in _working(handles) for device in (handle, *_slices(handle)))
    by_uuid = {str(pynvml.nvmlDeviceGetUUID(device)): device for device in named}
    devices = []
    for name in names:
        if name.isdecimal():
            matching = list(handles[int(name) : int(name) + 1])
        else:
            matching = [device for uuid, device in by_uuid.items() if uuid.startswith(name)]
        if len(matching) != 1:
            break
        devices += _working(matching)
    return devices


def _slices(handle: Any) -> list[Any]:
    """Handles of a GPU's MIG devices; empty where MIG is off."""
    try:
        if pynvml.nvmlDeviceGetMigMode(handle)[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
            return []
    except (pynvml.NVMLError_NotSupported, *LOST):  # pyright: ignore[reportAttributeAccessIssue]
        return []
    slices = []
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with suppress(pynvml.NVMLError_NotFound):  # pyright: ignore[reportAttributeAccessIssue]
            slices.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
    return slices


def read_gpus(root: Path = Path("/")) -> Gpus | None:
    """The inventory; None without a driver. Raises pynvml.NVMLError where no GPU answers."""
    try:
        with _nvml() as handles:
            driver, cuda = pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlSystemGetCudaDriverVersion_v2() // 1000
            found = [_read_unless_lost(handle, handles, root) for handle in handles]
            _refuse_none_left(found)
            lost = tuple(position for position, gpu in enumerate(found) if gpu is None)
            return Gpus(tuple(_working(found)), str(driver), int(cuda), lost)
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):  # pyright: ignore[reportAttributeAccessIssue]
        return None


def _read_unless_lost(handle: Any, handles: Sequence[Any], root: Path) -> Gpu | None:
    try:
        return None if handle is None else _read_gpu(handle, handles, root)
    except LOST:
        return None


def _read_gpu(handle: Any, handles: Sequence[Any], root: Path) -> Gpu:
    """A GPU with its slices, or a MIG slice, which has no `handles` to be linked to."""
    memory, pci = _memory(handle), _pci(handle)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(_whole(handle))
    try:
        mig = bool(handles) and pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
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
        numa=numa_node(root / "sys/bus/pci/devices" / pci).replace("-1", ""),
        nics=tuple(nearest_devices([pci], root)),
        links=tuple(
            place
            for place, other in enumerate(handles)
            if other is not None and other is not handle and _has_link(handle, other)
        ),
        reserved=int(getattr(memory, "reserved", 0)),
        capability=(int(major), int(minor)),
        slices=tuple(_read_gpu(one, (), root) for one in (_slices(handle) if mig else ())),
    )


def _memory(handle: Any) -> Any:
    """Memory by the call that tells what the driver reserves from what processes hold; the old one counts both."""
    try:
        return pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except (pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NotSupported):  # pyright: ignore[reportAttributeAccessIssue]
        return pynvml.nvmlDeviceGetMemoryInfo(handle)  # drivers before 510, and MIG slices of some


def _has_link(one: Any, other: Any) -> bool:
    """Whether two GPUs reach each other by NVLink."""
    with suppress(pynvml.NVMLError_NotSupported, *LOST):  # pyright: ignore[reportAttributeAccessIssue]
        status = pynvml.nvmlDeviceGetP2PStatus(one, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
        return status == pynvml.NVML_P2P_STATUS_OK
    return False


def _pci(handle: Any) -> str:
    """PCI address as the kernel writes it: `0000:18:00.0`."""
    # NVML writes the domain with eight digits, the kernel with four.
    return str(pynvml.nvmlDeviceGetPciInfo(_whole(handle)).busId).lower()[-12:]


def _whole(handle: Any) -> Any:
    """The GPU of a MIG slice; any other is its own."""
    with suppress(pynvml.NVMLError):
        return pynvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
    return handle
