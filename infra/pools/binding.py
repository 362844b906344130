"""The cores near a GPU."""

import os
from pathlib import Path

import pynvml

from infra.network.rdma import numa_node
from infra.pools.gpus import pci_addresses
from infra.quantities import numbers


def near_cores(gpu: str, root: Path = Path("/")) -> set[int]:
    """Of the cores that this process may use those on the NUMA node of a GPU; all of them if that is unknown.

    `gpu`: named as in $CUDA_VISIBLE_DEVICES.
    """
    allowed = os.sched_getaffinity(0)
    try:
        (address,) = pci_addresses([gpu])
    except pynvml.NVMLError:  # torch will say what is wrong with it
        return allowed
    node = numa_node(root / "sys/bus/pci/devices" / address)
    file = root / f"sys/devices/system/node/node{node}/cpulist"
    return (file.is_file() and allowed & set(numbers(file.read_text()))) or allowed
