"""RDMA devices of this machine, and which are close to a GPU."""

from collections.abc import Sequence
from pathlib import Path


def active_devices(root: Path = Path("/")) -> list[str]:
    """Names of the devices that have a port with a link."""
    devices = sorted((root / "sys/class/infiniband").glob("*"))
    return [one.name for one in devices if any("ACTIVE" in state.read_text() for state in one.glob("ports/*/state"))]


def nearest_devices(gpus: Sequence[str], root: Path = Path("/")) -> list[str]:
    """Of the active devices those nearest to any of the GPUs (PCI addresses); all of them where no GPU is named.

    Near is who shares the longest way through PCIe switches, and, where none is shared, who is on the same NUMA node.
    """
    active = active_devices(root)
    if not gpus or not active:
        return active
    chosen: set[str] = set()
    for gpu in gpus:
        mine = root / "sys/bus/pci/devices" / gpu
        nearness = {name: _nearness(mine, root / "sys/class/infiniband" / name / "device") for name in active}
        chosen |= {name for name in active if nearness[name] == max(nearness.values())}
    return sorted(chosen)


def _nearness(one: Path, other: Path) -> tuple[int, bool]:
    """Bridges that both hang below, and whether they share a NUMA node."""
    shared = 0
    for mine, theirs in zip(one.resolve().parts, other.resolve().parts, strict=False):
        if mine != theirs:
            break
        shared += 1
    return shared, numa_node(one) == numa_node(other)


def numa_node(device: Path) -> str:
    """NUMA node of a device below /sys; empty if unknown."""
    file = device / "numa_node"
    return file.read_text().strip() if file.is_file() else ""
