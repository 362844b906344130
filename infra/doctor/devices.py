"""Checks of GPUs by NVML and of RDMA devices; reading and judging are separate."""

import re
import resource
from dataclasses import dataclass
from pathlib import Path

from infra.doctor.finding import Finding, note, ok, problem
from infra.pools.gpus import NVLINK, Gpu, Gpus
from infra.quantities import byte_size

GET_TORCH = "see https://pytorch.org/get-started"


@dataclass(frozen=True)
class TorchBuild:
    """What the installed torch was built for, read from its files."""

    version: str
    cuda: int | None
    """Major version of CUDA; None = CPU only."""
    rocm: bool = False


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
    shown = f"{gpu.name}, {byte_size(gpu.free)} free of {byte_size(gpu.total)}, {driver}{_surroundings(gpu)}"
    if gpu.mig:
        remedy = "a run leases whole GPUs: leave this one out, or switch MIG off (`nvidia-smi -mig 0`)"
        return note(name, f"{shown}; MIG is on, so that CUDA sees a slice of it at most", remedy)
    if gpu.held:
        remedy = "stop them (outside of this container, where they cannot be seen): until then no run leases this GPU"
        return note(name, f"{shown}; in use by {gpu.held}", remedy)
    return ok(name, shown)


def _surroundings(gpu: Gpu) -> str:
    """PCI address, NUMA node and nearby devices."""
    places = [f"NUMA node {gpu.numa}"] if gpu.numa else []
    places += [f"RDMA by {', '.join(gpu.nics)}"] if gpu.nics else []
    for way in dict.fromkeys(filter(None, gpu.links)):
        reached = ", ".join(str(index) for index, link in enumerate(gpu.links) if link == way)
        places.append(f"{way} to GPU {reached}" if way == NVLINK else f"GPU {reached} through {way}")
    return "".join(f", {place}" for place in places)


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
    if (root / "proc/driver/nvidia").is_dir():
        findings.append(_judge_gpudirect(root))
    return findings


def _judge_gpudirect(root: Path) -> Finding:
    if (root / "sys/module/nvidia_peermem").is_dir():
        return ok("GPUDirect", "nvidia-peermem is loaded: samples may arrive in the GPU's own memory")
    return note("GPUDirect", "samples arrive in host memory", "`modprobe nvidia-peermem` lets them arrive in the GPU's")


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
