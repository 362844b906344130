"""Probes of installed packages and engines, by their metadata; nothing is imported."""

from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from infra.doctor.finding import Finding, judge
from infra.refusal import Refusal
from infra.transport.mooncake.environment import carries_gpu_memory, check_mooncake, choose_protocol

Versions = Mapping[str, str]
"""Normalised distribution name -> installed version."""
THIS = "draftsmith"


class Clash(NamedTuple):
    """Installed versions that do not work, or not together."""

    packages: Mapping[str, str]
    """Versions by package; the clash exists if all of them are installed."""
    is_problem: bool
    why: str
    remedy: str


CLASHES = (
    Clash({"lightning": "==2.6.2 || ==2.6.3"}, True, "a malicious upload (GHSA-w37p-236h-pfx3)",
          "pip install 'lightning>=2.6.4,<2.7', and replace the secrets that this machine held"),
    Clash({"prefect": "<3.9", "fastapi": ">=0.151"}, True,
          "Prefect's server dies at import: Body() got an unexpected keyword argument 'min_items'",
          "pip install 'fastapi>=0.139,<0.151'"),
    Clash({"prefect": "<3.9", "sqlalchemy": ">=2.1"}, True,
          "Prefect's scheduler fails in every pass (Can't evaluate bulk DML statement), so that no schedule ever runs",
          "pip install 'sqlalchemy<2.1'"),
    Clash({"torch": "<2.13"}, True, "its compiler lacks what training on GPUs sets",
          "pip install 'torch>=2.13'"),
    Clash({"sglang": "!=0.5.23"}, False, "Draftsmith's capture is made for the internals of SGLang 0.5.23",
          "pip install sglang==0.5.23 in SGLang's own environment"),
    Clash({"sglang": ">=0", "prefect": ">=0"}, False,
          "SGLang pins a torch of its own and would replace this environment's",
          "keep it in an environment of its own, .venv-sglang"),
)  # fmt: skip


def installed(folders: list[str] | None = None) -> dict[str, str]:
    """Versions of everything installed in this interpreter's path, or in the given site-packages folders."""
    found = metadata.distributions(path=folders) if folders is not None else metadata.distributions()
    versions: dict[str, str] = {}
    for one in found:
        versions.setdefault(canonicalize_name(one.name), one.version)
    return versions


def clashes(versions: Versions) -> list[Finding]:
    """Versions known to clash: one finding each."""
    findings = []
    for clash in CLASHES:
        if all(_matches(versions.get(name), wanted) for name, wanted in clash.packages.items()):
            shown = " with ".join(f"{name} {versions[name]}" for name in clash.packages)
            findings.append(judge(f"{shown}: {clash.why}", problem=clash.is_problem, note=True, remedy=clash.remedy))
    return findings or [judge("none of those known to clash")]


def _matches(version: str | None, wanted: str) -> bool:
    alternatives = (SpecifierSet(one.strip()) for one in wanted.split("||"))
    return version is not None and any(one.contains(version, prereleases=True) for one in alternatives)


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


def version_of(package: str, versions: Versions) -> Finding:
    """Its installed version."""
    version = versions.get(package)
    return judge(version or "not installed", problem=version is None)


def sglang(environment: Path) -> Finding | list[Finding]:
    """SGLang in an environment of its own, with Draftsmith's plugin."""
    if not environment.is_dir():
        return judge(f"no environment at {environment}", note=True)
    versions = installed([str(path) for path in environment.glob("lib/python3*/site-packages")])
    if "sglang" not in versions:
        return judge(f"not installed in {environment}", note=True)
    found = f"{versions['sglang']} in {environment}"
    if THIS not in versions:
        return judge(f"{found}, without Draftsmith's capture plugin", problem=True)
    return [one for one in clashes(versions) if one.verdict != "ok"] or judge(found)


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
