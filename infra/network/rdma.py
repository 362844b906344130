"""RDMA devices of this machine, and which are close to a GPU."""

import os
from collections.abc import Sequence
from pathlib import Path

LINK_LAYERS = {"InfiniBand", "Ethernet"}
"""Of the devices that Mooncake speaks to; AWS's EFA, for example, is none."""


def active_devices(root: Path = Path("/")) -> list[str]:
    """Names of the devices that have a port with a link and that this process can open."""
    devices = sorted((root / "sys/class/infiniband").glob("*"))
    return [one.name for one in devices if any(map(has_link, one.glob("ports/*"))) and can_open(one.name, root)]


def has_link(port: Path) -> bool:
    """Whether a port is active and of a kind that Mooncake speaks to."""
    return "ACTIVE" in (port / "state").read_text() and (port / "link_layer").read_text().strip() in LINK_LAYERS


def can_open(device: str, root: Path = Path("/")) -> bool:
    """Whether this process can open a device. In a container /sys shows those of the host, which it may not have."""
    classes = (root / "sys/class/infiniband_verbs").glob("uverbs*/ibdev")
    for verbs in (one.parent.name for one in classes if one.read_text().strip() == device):
        try:
            # Not os.access: a container's device rules deny only the opening.
            os.close(os.open(root / "dev/infiniband" / verbs, os.O_RDWR))
        except OSError:
            continue
        return True
    return False


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
