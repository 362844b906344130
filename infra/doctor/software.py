"""Checks of installed packages and engines, by their metadata; nothing is imported."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from infra.doctor.finding import Finding, note, ok, problem
from infra.refusal import Refusal
from infra.transport.mooncake.environment import INSTALL, check_mooncake, choose_protocol

Versions = Mapping[str, str]
"""Normalised distribution name -> installed version."""
THIS = "draftsmith"


@dataclass(frozen=True)
class Clash:
    """Installed versions that do not work, or not together."""

    packages: Mapping[str, str]
    """Versions by package; the clash exists if all of them are installed."""
    verdict: Literal["note", "problem"]
    why: str
    remedy: str


CLASHES = (
    Clash(
        {"lightning": "==2.6.2 || ==2.6.3"},
        "problem",
        "a malicious upload (GHSA-w37p-236h-pfx3)",
        "pip install 'lightning>=2.6.4,<2.7', and replace the secrets that this machine held",
    ),
    Clash(
        {"prefect": "<3.9", "fastapi": ">=0.151"},
        "problem",
        "Prefect's server dies at import: Body() got an unexpected keyword argument 'min_items'",
        "pip install 'fastapi>=0.139,<0.151'",
    ),
    Clash(
        {"prefect": "<3.9", "sqlalchemy": ">=2.1"},
        "problem",
        "Prefect's scheduler fails in every pass (Can't evaluate bulk DML statement), so that no schedule ever runs",
        "pip install 'sqlalchemy<2.1'",
    ),
    Clash({"torch": "<2.11"}, "problem", "too old for Draftsmith", "pip install 'torch>=2.11'"),
    Clash(
        {"sglang": "<0.5.23"},
        "note",
        "SGLang captures hidden states natively from 0.5.23 on",
        "pip install 'sglang>=0.5.23' in SGLang's own environment",
    ),
    Clash(
        {"sglang": ">=0", "prefect": ">=0"},
        "note",
        "SGLang pins a torch of its own and would replace this environment's",
        "keep it in an environment of its own, .venv-sglang",
    ),
)


def installed(folders: list[str] | None = None) -> dict[str, str]:
    """Versions of everything installed in this interpreter's path, or in the given site-packages folders."""
    found = metadata.distributions(path=folders) if folders is not None else metadata.distributions()
    versions: dict[str, str] = {}
    for one in found:
        versions.setdefault(normalise(one.name), one.version)
    return versions


def normalise(name: str) -> str:
    """A distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def check_clashes(versions: Versions) -> list[Finding]:
    """Versions known to clash: one finding each."""
    findings = []
    for clash in CLASHES:
        if all(_matches(versions.get(name), wanted) for name, wanted in clash.packages.items()):
            shown = " with ".join(f"{name} {versions[name]}" for name in clash.packages)
            found = f"{shown}: {clash.why}"
            findings.append(Finding(name="versions", verdict=clash.verdict, found=found, remedy=clash.remedy))
    return findings or [ok("versions", "none of those known to clash")]


def _matches(version: str | None, wanted: str) -> bool:
    alternatives = (SpecifierSet(one.strip()) for one in wanted.split("||"))
    return version is not None and any(one.contains(version, prereleases=True) for one in alternatives)


def check_requirements(versions: Versions, requirements: list[str]) -> list[Finding]:
    """Whether what the project declares is installed, in the versions it declares; the quickstart's target too."""
    missing, other = [], []
    count = 0
    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker and not requirement.marker.evaluate({"extra": "quickstart"}):
            continue
        count += 1
        version = versions.get(normalise(requirement.name))
        if version is None:
            missing.append(requirement.name)
        elif not requirement.specifier.contains(version, prereleases=True):
            other.append(f"{requirement.name} {version} instead of {requirement.specifier}")
    if not missing and not other:
        return [ok("packages", f"all {count} that Draftsmith and its quickstart declare")]
    found = "; ".join([*(f"{name} is missing" for name in missing), *other])
    return [problem("packages", found, "pip install --editable '.[quickstart]' in the project's folder")]


def declared() -> list[str]:
    """The installed project's requirements. Raises Refusal if it is not installed."""
    try:
        return metadata.requires(THIS) or []
    except metadata.PackageNotFoundError as error:
        raise Refusal("draftsmith itself is not installed in this environment") from error


def check_engines(versions: Versions, sglang_environment: Path) -> list[Finding]:
    """Which engines can run the target, and whether Mooncake can carry."""
    return [_check_transformers(versions), *_check_sglang(sglang_environment), check_mooncake_here()]


def _check_transformers(versions: Versions) -> Finding:
    version = versions.get("transformers")
    if version:
        return ok("engine transformers", version)
    return problem("engine transformers", "not installed", "pip install 'transformers>=5.17,<6'")


def _check_sglang(environment: Path) -> list[Finding]:
    name = "engine SGLang"
    if not environment.is_dir():
        remedy = "none needed with generator.engine=transformers; `make sglang` makes it"
        return [note(name, f"no environment at {environment}", remedy)]
    versions = installed([str(path) for path in environment.glob("lib/python3*/site-packages")])
    if "sglang" not in versions:
        return [note(name, f"not installed in {environment}", f"{environment}/bin/pip install 'sglang>=0.5.23'")]
    if THIS not in versions:
        found = f"{versions['sglang']} in {environment}, without Draftsmith's capture plugin"
        return [problem(name, found, f"{environment}/bin/pip install --no-deps --editable . in the project's folder")]
    clashes = [one for one in check_clashes(versions) if one.verdict != "ok"]
    return [one.model_copy(update={"name": name}) for one in clashes] or [
        ok(name, f"{versions['sglang']} in {environment}")
    ]


def check_mooncake_here(root: Path = Path("/")) -> Finding:
    """Whether Mooncake runs, and by which protocol it would carry between machines."""
    name = "Mooncake"
    if find_spec("mooncake") is None:
        return note(name, "not installed", f"none needed on one machine; between several: {INSTALL}")
    try:
        check_mooncake()
    except Refusal:
        remedy = "install libibverbs1 (Debian, Ubuntu) or libibverbs (RHEL)"
        return note(name, "installed, but libibverbs.so.1 is missing", remedy)
    return ok(name, f"installed; between machines it carries by {choose_protocol('auto', root).upper()}")
