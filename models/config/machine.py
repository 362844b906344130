"""What devices decide of a recipe: how many ranks train, and in which data type a CPU computes."""

from itertools import takewhile
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
    """Whether this processor multiplies matrices faster in bfloat16 than in float32, with torch 2.13.

    Intel's do with AMX (7 times, measured) and AMD's with AVX-512's bfloat16 instructions (4 times, measured). Intel's
    with these instructions alone are slower than in float32.
    """
    try:
        with cpuinfo.open() as lines:
            first = [line.partition(":") for line in takewhile(str.strip, lines)]
    except OSError:
        return False  # not Linux
    facts = {name.strip(): value.split() for name, _, value in first}
    flags, amd = facts.get("flags", []), facts.get("vendor_id") == ["AuthenticAMD"]
    return "amx_bf16" in flags or (amd and "avx512_bf16" in flags)


def with_fast_arithmetic(tree: Tree, cpuinfo: Path = CPUINFO) -> Tree:
    """A recipe's tree that computes in bfloat16, where it is silent, on a CPU that is faster in it.

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


def with_all_gpus_used(tree: Tree) -> Tree:
    """A recipe's tree with a trainer rank for each GPU that trains, and for those that capture SGLang, or a generator
    in transformers for each, where it is silent about these."""
    pools = tree.get("pools") or {}
    sections = {name: tree.get(name) or {} for name in ("training", "generator")}
    if not all(isinstance(section, dict) for section in (pools, *sections.values())):
        return tree  # which is refused later
    if (gpus := pools.get("training_gpus")) and sections["training"].get("ranks") is None:
        sections["training"] = sections["training"] | {"ranks": gpus}
    generator = sections["generator"]
    if (gpus := pools.get("inference_gpus")) and not generator.get("live"):
        engine = generator.get("engine") or "sglang"
        alone = {"count": gpus} if engine == "transformers" and generator.get("count") is None else {}
        sections["generator"] = generator | {"engine": engine} | alone
    return tree | {name: section for name, section in sections.items() if section}
