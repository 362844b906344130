"""This machine's GPUs, by NVML: the one file that calls it.

Where there is no driver there are no GPUs. Raises pynvml.NVMLError for what a driver cannot say.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml

from infra.network.rdma import nearest_devices, numa_node
from infra.processes.control_groups import memory
from infra.quantities import byte_size
from infra.refusal import Refusal
from infra.settings import ignored_gpu_bytes, mps_folder, visible_devices

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
    most_processes: int | None = None
    """How many processes its compute mode lets compute on it at a time; None: any number."""
    unified: bool = False
    """Whether its memory is the machine's, as in a DGX Spark."""

    @property
    def offered(self) -> tuple["Gpu", ...]:
        """What CUDA can use of it: itself, or with MIG its slices, of which there may be none yet."""
        return self.slices if self.mig else (self,)

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
    lost: Mapping[int, str] = field(default_factory=dict)
    """What NVML says of GPUs that do not answer, by their positions among all in PCI order."""

    @property
    def devices(self) -> tuple[Gpu, ...]:
        """What can be leased: whole GPUs, and the slices of those with MIG."""
        return tuple(device for gpu in self.gpus for device in gpu.offered)


@contextmanager
def _nvml() -> Iterator[list[Any]]:
    """Handles of all GPUs that this process may use, in the order of their PCI addresses; errors in place of lost ones.

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
    """A GPU's handle, or the error of one that cannot be used because it fell off the bus or needs a reset, say.

    The error takes the handle's place, so that the positions of the others stay. Raises pynvml.NVMLError_NoPermission
    for a GPU that a control group hides, which has no position.
    """
    handle = None
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        # Some drivers hand out the handle of a GPU that answers nothing more.
        pynvml.nvmlDeviceGetUUID(handle)
        for device in _offered(handle):
            _memory(device)
        return handle
    except pynvml.NVMLError as error:
        # Of a GPU that is there, only root may read some things.
        if handle is None and error.value == pynvml.NVML_ERROR_NO_PERMISSION:  # pyright: ignore[reportAttributeAccessIssue]
            raise
        return error


def _working(answers: Sequence[Any]) -> list[Any]:
    return [answer for answer in answers if not isinstance(answer, pynvml.NVMLError)]


def _refuse_none_left(answers: Sequence[Any]) -> None:
    if answers and not _working(answers):
        raise answers[0]


def visible_gpus() -> tuple[str, ...]:
    """UUIDs of the GPUs and MIG slices that $CUDA_VISIBLE_DEVICES leaves; empty without a working driver."""
    names = visible_devices()
    try:
        with _nvml() as handles:
            return _leasable(_working(handles) if names is None else _resolve(names, handles))
    except pynvml.NVMLError:
        return ()


def named_gpus(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """UUIDs of the GPUs and MIG slices that each name, one as in $CUDA_VISIBLE_DEVICES, permits to lease.

    Empty for a name that belongs to no device, or to several. A name stands for itself without a working driver, and
    where it may be that of a lost GPU; one that may be that of a GPU hidden from this process is left out.
    """
    try:
        with _nvml() as handles:
            is_hidden = len(handles) < pynvml.nvmlDeviceGetCount()
            is_lost = len(handles) > len(_working(handles))
            leasable = {name: _leasable(_resolve([name], handles)) for name in names}
    except pynvml.NVMLError:
        return {name: (name,) for name in names}
    return {name: gpus or ((name,) if is_lost else ()) for name, gpus in leasable.items() if gpus or not is_hidden}


def _leasable(devices: Sequence[Any]) -> tuple[str, ...]:
    """UUIDs of devices, each once; those of its slices in place of a GPU with MIG."""
    uuids = dict[str, None]()
    for device in devices:
        uuid = str(pynvml.nvmlDeviceGetUUID(device))
        offered = [device] if uuid.startswith("MIG-") else _offered(device)
        uuids |= dict.fromkeys(str(pynvml.nvmlDeviceGetUUID(one)) for one in offered)
    return tuple(uuids)


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


def _offered(handle: Any) -> list[Any]:
    """What CUDA can use of a whole GPU: itself, or with MIG its slices, of which there may be none yet."""
    return _slices(handle) if _has_mig(handle) else [handle]


def _slices(handle: Any) -> list[Any]:
    """Handles of a GPU's MIG devices; empty where MIG is off."""
    slices = []
    if not _has_mig(handle):
        return slices
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with suppress(pynvml.NVMLError_NotFound):  # pyright: ignore[reportAttributeAccessIssue]
            slices.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
    return slices


def _has_mig(handle: Any) -> bool:
    with suppress(pynvml.NVMLError_NotSupported):  # pyright: ignore[reportAttributeAccessIssue]
        return pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    return False


def read_gpus(root: Path = Path("/")) -> Gpus | None:
    """The inventory; None without a driver. Raises Refusal where the driver or no GPU answers."""
    try:
        with _nvml() as handles:
            driver, cuda = pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlSystemGetCudaDriverVersion_v2() // 1000
            found = [_read_unless_lost(handle, handles, root) for handle in handles]
            _refuse_none_left(found)
            lost = {place: str(gpu) for place, gpu in enumerate(found) if isinstance(gpu, pynvml.NVMLError)}
            return Gpus(tuple(_working(found)), str(driver), int(cuda), lost)
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):  # pyright: ignore[reportAttributeAccessIssue]
        return None
    except pynvml.NVMLError as error:
        raise Refusal(
            f"this machine's GPUs do not answer ({error}): see what nvidia-smi says of them; after an upgrade of "
            "NVIDIA's driver restart the machine"
        ) from error


def _read_unless_lost(handle: Any, handles: Sequence[Any], root: Path) -> Gpu | pynvml.NVMLError:
    try:
        return handle if isinstance(handle, pynvml.NVMLError) else _read_gpu(handle, handles, root)
    except pynvml.NVMLError as error:
        return error


def _read_gpu(handle: Any, handles: Sequence[Any], root: Path) -> Gpu:
    """A GPU with its slices, or a MIG slice, which has no `handles` to be linked to."""
    pci = _pci(handle)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(_whole(handle))
    mig = bool(handles) and _has_mig(handle)
    slices = tuple(_read_gpu(one, (), root) for one in (_slices(handle) if mig else ()))
    # Only root may read the memory of a whole GPU with MIG.
    memories = slices if mig else (_memory(handle),)
    return Gpu(
        name=str(pynvml.nvmlDeviceGetName(handle)),
        total=sum(int(one.total) for one in memories),
        free=sum(int(one.free) for one in memories),
        others=tuple((pid, held) for pid, held in _processes(handle) if pid != os.getpid()),
        mig=mig,
        uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
        numa=numa_node(root / "sys/bus/pci/devices" / pci).replace("-1", ""),
        nics=tuple(nearest_devices([pci], root)),
        links=tuple(
            place
            for place, other in enumerate(handles)
            if other is not handle and not isinstance(other, pynvml.NVMLError) and _has_link(handle, other)
        ),
        reserved=sum(int(getattr(one, "reserved", 0)) for one in memories),
        capability=(int(major), int(minor)),
        most_processes=_most_processes(handle),
        unified=any(getattr(one, "unified", False) for one in memories),
        slices=slices,
    )


def _most_processes(handle: Any) -> int | None:
    """How many processes may compute on a device at a time; None: any number, or the driver does not say.

    Where NVIDIA's MPS runs, its server is the one process, and computes for any number.
    """
    with suppress(pynvml.NVMLError):
        mode = pynvml.nvmlDeviceGetComputeMode(_whole(handle))
        if mode == pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS and (mps_folder() / "control").exists():
            return None
        return {pynvml.NVML_COMPUTEMODE_PROHIBITED: 0, pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: 1}.get(mode)
    return None


def _processes(handle: Any) -> list[tuple[int, int]]:
    """(process id, bytes held) of processes that compute on a device; 0 bytes where the driver does not say."""
    with suppress(pynvml.NVMLError_NotSupported, pynvml.NVMLError_NoPermission):  # pyright: ignore[reportAttributeAccessIssue]
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        return [(int(one.pid), int(one.usedGpuMemory or 0)) for one in running]
    return []


def _memory(handle: Any) -> Any:
    """Memory by the call that tells what the driver reserves from what processes hold; the old one counts both.

    That of the machine where the GPU has none of its own, as in a DGX Spark.
    """
    with suppress(pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NotSupported):  # pyright: ignore[reportAttributeAccessIssue]
        return pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    with suppress(pynvml.NVMLError_NotSupported):  # pyright: ignore[reportAttributeAccessIssue]
        return pynvml.nvmlDeviceGetMemoryInfo(handle)  # drivers before 510, and MIG slices of some
    held = sum(size for _, size in _processes(handle))
    return SimpleNamespace(total=memory(), free=max(0, memory() - held), unified=True)


def _has_link(one: Any, other: Any) -> bool:
    """Whether two GPUs reach each other by NVLink."""
    with suppress(pynvml.NVMLError):
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
