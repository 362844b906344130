"""Probes of installed packages and engines, by their metadata; nothing is imported."""

from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from infra.doctor.finding import Finding, judge
from infra.refusal import Refusal
from infra.transport.mooncake.environment import carries_gpu_memory, check_mooncake, choose_protocol

Versions = Mapping[str, str]
"""Normalised distribution name -> installed version."""
THIS = "draftsmith"
TESTED_SGLANG = "0.5.23"
INSTALL = "pip install --editable '.[quickstart]' in the project's folder"


def installed(folders: list[str] | None = None) -> dict[str, str]:
    """Versions of everything installed in this interpreter's path, or in the given site-packages folders."""
    found = metadata.distributions(path=folders) if folders is not None else metadata.distributions()
    versions: dict[str, str] = {}
    for one in found:
        versions.setdefault(canonicalize_name(one.name), one.version)
    return versions


def requirements(versions: Versions, declared: list[str]) -> Finding:
    """Whether what the project declares is installed, in the versions it declares; the quickstart's target too."""
    every = [Requirement(text) for text in declared]
    wanted = [one for one in every if one.marker is None or one.marker.evaluate({"extra": "quickstart"})]
    faults = []
    for requirement in wanted:
        version = versions.get(canonicalize_name(requirement.name))
        if version is None:
            faults.append(f"{requirement.name} is missing")
        elif not requirement.specifier.contains(version, prereleases=True):
            faults.append(f"{requirement.name} {version} instead of {requirement.specifier}")
    found = "; ".join(faults) or f"all {len(wanted)} that Draftsmith and its quickstart declare"
    return judge(found, problem=bool(faults))


def declared() -> list[str]:
    """The installed project's requirements. Raises Refusal if it is not installed."""
    try:
        return metadata.requires(THIS) or []
    except metadata.PackageNotFoundError as error:
        raise Refusal("draftsmith itself is not installed in this environment") from error


def sglang(environment: Path) -> Finding:
    """SGLang in an environment of its own, with Draftsmith's plugin."""
    if not environment.is_dir():
        return judge(f"no environment at {environment}", note=True)
    versions = installed([str(path) for path in environment.glob("lib/python3*/site-packages")])
    if "sglang" not in versions:
        return judge(f"not installed in {environment}", note=True)
    found = f"{versions['sglang']} in {environment}"
    if THIS not in versions:
        return judge(f"{found}, without Draftsmith's capture plugin", problem=True)
    if versions["sglang"] != TESTED_SGLANG:
        return judge(f"{found}; Draftsmith's capture is made for the internals of {TESTED_SGLANG}", note=True)
    return judge(found)


def mooncake(root: Path = Path("/")) -> Finding:
    """Whether Mooncake runs, and by which protocol it would carry between machines."""
    if find_spec("mooncake") is None:
        return judge("not installed", note=True)
    try:
        check_mooncake()
    except Refusal as refusal:
        return judge(f"installed, but: {refusal}", note=True)
    build = "for CUDA 13, " if carries_gpu_memory() else ""
    return judge(f"installed, {build}between machines it carries by {choose_protocol('auto', root).upper()}")
