"""Checks of GPUs by NVML and of RDMA devices. Used by `draftsmith doctor`; reading and judging are apart."""

import os
import re
import resource
from dataclasses import dataclass
from pathlib import Path

import pynvml

from infra.doctor.finding import Finding, gib, note, ok, problem

GET_TORCH = "see https://pytorch.org/get-started"
UNSEEN_BYTES = 2**30
"""More than a driver keeps for itself on an idle GPU."""


@dataclass(frozen=True)
class Gpu:
    """One GPU as NVML sees it; sizes in bytes."""

    name: str
    total: int
    free: int
    others: tuple[tuple[int, int], ...] = ()
    """(process id, bytes held) of processes that compute on it; bytes are 0 where the driver does not say."""
    mig: bool = False


@dataclass(frozen=True)
class Gpus:
    """The GPUs of this machine and their driver."""

    gpus: tuple[Gpu, ...]
    driver: str
    cuda: int
    """Highest CUDA major version that the driver supports."""


@dataclass(frozen=True)
class TorchBuild:
    """What the installed torch was built for, read from its files."""

    version: str
    cuda: int | None
    """Major version of CUDA; None = CPU only."""
    rocm: bool = False


def read_gpus() -> Gpus | None:
    """Ask NVML; None where there is no driver. Raises pynvml.NVMLError for what a driver cannot say."""
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):  # pyright: ignore[reportAttributeAccessIssue]
        return None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        driver, cuda = pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlSystemGetCudaDriverVersion_v2() // 1000
        return Gpus(tuple(_read_gpu(handle) for handle in handles), str(driver), int(cuda))
    finally:
        pynvml.nvmlShutdown()


def _read_gpu(handle: object) -> Gpu:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        mig = pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    except pynvml.NVMLError_NotSupported:  # pyright: ignore[reportAttributeAccessIssue]
        mig = False
    try:
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_NoPermission):  # pyright: ignore[reportAttributeAccessIssue]
        processes = []
    others = tuple((int(one.pid), int(one.usedGpuMemory or 0)) for one in processes if one.pid != os.getpid())
    return Gpu(str(pynvml.nvmlDeviceGetName(handle)), int(memory.total), int(memory.free), others, mig)


def read_torch(file: Path, version: str) -> TorchBuild:
    """The build written down in torch's `version.py`, without importing torch."""
    text = file.read_text()
    cuda = re.search(r"^cuda\b[^=]*= *'(\d+)", text, re.MULTILINE)
    rocm = re.search(r"^hip\b[^=]*= *'", text, re.MULTILINE)
    return TorchBuild(version, int(cuda[1]) if cuda else None, bool(rocm))


def check_gpus(found: Gpus | None, root: Path = Path("/")) -> list[Finding]:
    """One finding for each GPU, or one that says that there is none."""
    if found is None or not found.gpus:
        if _nvidia_cards(root):
            return [note("GPUs", "an NVIDIA card, but no driver", "install NVIDIA's driver: the CPU is used")]
        return [ok("GPUs", "none by NVML: generators and trainer use the CPU")]
    driver = f"driver {found.driver}, CUDA up to {found.cuda}"
    return [_judge_gpu(f"GPU {index}", gpu, driver) for index, gpu in enumerate(found.gpus)]


def _judge_gpu(name: str, gpu: Gpu, driver: str) -> Finding:
    shown = f"{gpu.name}, {gib(gpu.free)} free of {gib(gpu.total)}, {driver}"
    if gpu.mig:
        remedy = "a run leases whole GPUs: leave this one out, or switch MIG off (`nvidia-smi -mig 0`)"
        return note(name, f"{shown}; MIG is on, so that CUDA sees a slice of it at most", remedy)
    if gpu.others:
        held = ", ".join(f"process {pid}" + (f" ({gib(size)})" if size else "") for pid, size in gpu.others[:4])
        return note(name, f"{shown}; in use by {held}", "stop them: a lease keeps only other runs off a GPU")
    if gpu.total - gpu.free > UNSEEN_BYTES:
        held = gib(gpu.total - gpu.free)
        remedy = "look outside this container: a lease keeps only other runs off a GPU"
        return note(name, f"{shown}; {held} are held by processes that cannot be seen from here", remedy)
    return ok(name, shown)


def _nvidia_cards(root: Path) -> bool:
    for vendor in (root / "sys/bus/pci/devices").glob("*/vendor"):
        display = (vendor.parent / "class").read_text().startswith("0x03")
        if display and vendor.read_text().strip() == "0x10de":
            return True
    return False


def check_torch(build: TorchBuild, found: Gpus | None) -> list[Finding]:
    """Whether torch's build fits the GPUs (its version is another check's)."""
    kind = f"CUDA {build.cuda}" if build.cuda else "ROCm" if build.rocm else "CPU only"
    shown, gpus = f"{build.version}, {kind}", len(found.gpus) if found else 0
    if found and gpus and build.cuda is None:
        remedy = f"install a CUDA build: {GET_TORCH}"
        return [problem("torch build", f"{shown}, and this machine has {gpus} GPUs", remedy)]
    if found and gpus and build.cuda is not None and build.cuda > found.cuda:
        remedy = f"update the driver, or install a build for CUDA {found.cuda}: {GET_TORCH}"
        return [problem("torch build", f"{shown}, and the driver supports CUDA up to {found.cuda}", remedy)]
    if build.cuda is not None and not gpus:
        remedy = f"none needed; the CPU build is gigabytes smaller: {GET_TORCH}"
        return [note("torch build", f"{shown}, on a machine without GPUs", remedy)]
    return [ok("torch build", shown)]


def check_rdma(root: Path = Path("/"), memlock: int | None = None) -> list[Finding]:
    """RDMA devices with their ports, and whether memory may be pinned for them."""
    devices = sorted((root / "sys/class/infiniband").glob("*"))
    if not devices:
        return [ok("RDMA", "no device: hidden states go through shared memory or TCP")]
    findings = [_judge_rdma(device) for device in devices]
    if not list((root / "dev/infiniband").glob("uverbs*")):
        remedy = "pass the devices into the container (`--device=/dev/infiniband`), or load ib_uverbs"
        findings.append(note("RDMA access", "no /dev/infiniband/uverbs*: programs cannot open the devices", remedy))
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if memlock is None else memlock
    if soft == resource.RLIM_INFINITY:
        findings.append(ok("locked memory", "unlimited"))
    else:
        remedy = "`ulimit -l unlimited` (limits.conf: memlock; systemd: LimitMEMLOCK; Docker: --ulimit memlock=-1)"
        findings.append(note("locked memory", f"at most {soft // 1024} KiB, too little to register buffers", remedy))
    return findings


def _judge_rdma(device: Path) -> Finding:
    ports = []
    for port in sorted((device / "ports").glob("*")):
        state = (port / "state").read_text().strip().rpartition(": ")[2]
        layer, rate = (port / "link_layer").read_text().strip(), (port / "rate").read_text().strip()
        ports.append((state, f"port {port.name} {state} ({layer}, {rate})"))
    found = "; ".join(text for _, text in ports) or "no ports"
    if any(state == "ACTIVE" for state, _ in ports):
        return ok(f"RDMA {device.name}", found)
    return note(f"RDMA {device.name}", found, "no port is active: check cable, switch and subnet manager")
