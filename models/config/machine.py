"""What the machine decides of a recipe: in which data type a CPU computes."""

from pathlib import Path
from typing import Any

CPUINFO = Path("/proc/cpuinfo")
DTYPE_SETTINGS = (
    ("generator", "compute_dtype", "inference_gpus"),
    ("training", "precision", "training_gpus"),
    ("benchmark", "compute_dtype", "inference_gpus"),
)
"""Section, setting, and the pool whose GPUs decide it where there are some."""
Tree = dict[str, Any]


def multiplies_bfloat16(cpuinfo: Path = CPUINFO) -> bool:
    """Whether this processor has AMX's units for bfloat16 matrices.

    With them a matrix product is about 7 times as fast as in float32. With AVX-512's bfloat16 instructions alone it is
    slower, because oneDNN, which torch multiplies with, spends more on packing than they save.
    """
    try:
        with cpuinfo.open() as lines:
            flags = next((line for line in lines if line.startswith("flags")), "")
    except OSError:
        return False  # not Linux
    return "amx_bf16" in flags.split()


def with_fast_arithmetic(tree: Tree, cpuinfo: Path = CPUINFO) -> Tree:
    """A recipe's tree that computes in bfloat16, where it is silent, on a CPU that has units for it.

    It is decided here, once: a run that goes on elsewhere goes on in the data type that it began with.
    """
    pools = tree.get("pools") or {}
    if not isinstance(pools, dict) or not multiplies_bfloat16(cpuinfo):
        return tree
    for section, setting, gpus in DTYPE_SETTINGS:
        settings = tree.get(section) or {}
        if isinstance(settings, dict) and settings.get(setting) is None and not pools.get(gpus):
            tree = tree | {section: settings | {setting: "bfloat16"}}
    return tree
