"""This machine's GPUs, by NVML. Used by pools, and by whoever looks for what is near a GPU."""

from collections.abc import Sequence

import pynvml


def visible_gpus() -> tuple[str, ...]:
    """UUIDs of this machine's GPUs; empty where there is no driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return tuple(str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles)
    finally:
        pynvml.nvmlShutdown()


def pci_addresses(gpus: Sequence[str]) -> list[str]:
    """Where GPUs (UUIDs) sit, as the kernel writes it: `0000:18:00.0`. Raises pynvml.NVMLError for one that is gone."""
    if not gpus:
        return []
    pynvml.nvmlInit()
    try:
        infos = [pynvml.nvmlDeviceGetPciInfo(pynvml.nvmlDeviceGetHandleByUUID(gpu)) for gpu in gpus]
    finally:
        pynvml.nvmlShutdown()
    # NVML writes the domain with eight digits, the kernel with four.
    return [str(info.busId).lower()[-12:] for info in infos]
