"""Probes of GPUs by NVML and of RDMA devices; reading and judging are separate."""

import resource
from pathlib import Path

from infra.doctor.finding import Finding, judge
from infra.network.rdma import can_open, has_link
from infra.pools.gpus import Gpu, Gpus
from infra.quantities import byte_size, plural

RESTART = "runs use the others; restart the machine, and read `dmesg | grep Xid` if that does not help"
NO_SLICE = "make slices (`nvidia-smi mig -cgi PROFILE -C`), or switch MIG off (`nvidia-smi -mig 0`)"
COMPUTE_MODES = {
    0: "(Prohibited) lets nothing compute on it",
    1: "(Exclusive Process) lets one process at a time use it: no pools.sharing=share, no two generators on it",
}
"""By the number of processes that they allow."""
ANY_PROCESSES = "`nvidia-smi -c DEFAULT`, as root, lets any number of processes use it"
NVIDIA_ONLY = "nothing to do for runs on the CPU; runs on GPUs need those of NVIDIA"
OTHER_LAYER = "Mooncake speaks InfiniBand and RoCE only: hidden states go through shared memory or TCP"


def gpus(inventory: Gpus | None, root: Path = Path("/")) -> list[Finding]:
    """One finding for each GPU, or one that says that there is none."""
    if inventory is None or not inventory.gpus:
        if _has_nvidia_card(root):
            return [judge("an NVIDIA card, but no driver: the CPU is used", note=True)]
        if (root / "dev/kfd").exists():
            return [judge("an AMD GPU, which Draftsmith cannot use: the CPU is used", note=True, remedy=NVIDIA_ONLY)]
        return [judge("none by NVML: generators and trainer use the CPU")]
    driver = f"driver {inventory.driver}, CUDA up to {inventory.cuda}"
    places = (place for place in range(len(inventory.gpus) + len(inventory.lost)) if place not in inventory.lost)
    working = [_judge_gpu(f"GPU {place}", gpu, driver) for place, gpu in zip(places, inventory.gpus, strict=True)]
    return working + [
        judge(f"does not answer ({why}), {driver}", note=True, name=f"GPU {place}", remedy=RESTART)
        for place, why in inventory.lost.items()
    ]


def _judge_gpu(name: str, gpu: Gpu, driver: str) -> Finding:
    if not gpu.offered:
        found = f"{gpu.name}, {driver}{_surroundings(gpu)}; MIG is on without a slice, so nothing can use it"
        return judge(found, note=True, name=name, remedy=NO_SLICE)
    found = f"{gpu.name}, {byte_size(gpu.free)} free of {byte_size(gpu.total)}, {driver}{_surroundings(gpu)}"
    if gpu.mig:
        found += f"; MIG is on: {plural(len(gpu.slices), 'slice')} can be leased, each by one process"
    elif gpu.held:
        found += f"; in use by {gpu.held}"
    if gpu.most_processes is not None:
        found += f"; its compute mode {COMPUTE_MODES[gpu.most_processes]}"
        return judge(found, note=True, name=name, remedy=ANY_PROCESSES)
    return judge(found, note=gpu.mig or bool(gpu.held), name=name)


def _surroundings(gpu: Gpu) -> str:
    """PCI address, NUMA node and nearby devices."""
    places = [f"NUMA node {gpu.numa}"] if gpu.numa else []
    places += [f"RDMA by {', '.join(gpu.nics)}"] if gpu.nics else []
    places += [f"NVLink to GPU {', '.join(map(str, gpu.links))}"] if gpu.links else []
    return "".join(f", {place}" for place in places)


def _has_nvidia_card(root: Path) -> bool:
    vendors = (root / "sys/bus/pci/devices").glob("*/vendor")
    return any(
        vendor.read_text().strip() == "0x10de" and (vendor.parent / "class").read_text().startswith("0x03")
        for vendor in vendors
    )


def rdma(root: Path = Path("/")) -> list[Finding]:
    """RDMA devices with their ports."""
    findings = [_judge_rdma(device) for device in _rdma_devices(root)]
    return findings or [judge("no device: hidden states go through shared memory or TCP")]


def _rdma_devices(root: Path) -> list[Path]:
    return sorted((root / "sys/class/infiniband").glob("*"))


def _judge_rdma(device: Path) -> Finding:
    shown, has_links, is_active = [], False, False
    for port in sorted(device.glob("ports/*")):
        state, layer, rate = ((port / name).read_text().strip() for name in ("state", "link_layer", "rate"))
        shown.append(f"port {port.name} {state.rpartition(': ')[2]} ({layer}, {rate})")
        is_active |= "ACTIVE" in state
        has_links |= has_link(port)
    remedy = OTHER_LAYER if is_active else ""
    return judge("; ".join(shown) or "no ports", note=not has_links, name=f"RDMA {device.name}", remedy=remedy)


def rdma_access(root: Path = Path("/")) -> Finding | list[Finding]:
    """Whether programs can open the RDMA devices, if there are any."""
    closed = [device.name for device in _rdma_devices(root) if not can_open(device.name, root)]
    if not closed:
        return []
    return judge(f"programs cannot open {', '.join(closed)}: no access to /dev/infiniband/uverbs*", note=True)


def locked_memory(root: Path = Path("/"), limit: int | None = None) -> Finding | list[Finding]:
    """Whether memory may be pinned for RDMA devices, if there are any."""
    if not _rdma_devices(root):
        return []
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    if soft == resource.RLIM_INFINITY:
        return judge("unlimited")
    return judge(f"at most {byte_size(soft)}, too little to register buffers", note=True)


def gpudirect(root: Path = Path("/")) -> Finding | list[Finding]:
    """Where samples arrive, if there are RDMA devices and NVIDIA GPUs."""
    if not _rdma_devices(root) or not (root / "proc/driver/nvidia").is_dir():
        return []
    if (root / "sys/module/nvidia_peermem").is_dir():
        return judge("nvidia-peermem is loaded: samples may arrive in the GPU's own memory")
    return judge("samples arrive in host memory", note=True)
