"""The separate Python environment of SGLang."""

from pathlib import Path

from infra.refusal import Refusal
from infra.settings import sglang_environment


def sglang_python() -> Path:
    """Its Python. Raises Refusal, with the remedy, where SGLang or our distribution in it is missing."""
    folder = sglang_environment()
    for wanted in ("sglang", "draftsmith"):
        if not any(folder.glob(f"lib/python3*/site-packages/{wanted}-*.dist-info")):
            raise Refusal(
                f"generator.engine=sglang: there is no {wanted} in {folder}. `make sglang` sets it up "
                "($DRAFTSMITH_SGLANG names another place), or set generator.engine=transformers"
            )
    return folder / "bin" / "python"


def sglang_version() -> str:
    """Version of SGLang in that environment. Raises Refusal, with the remedy, if it is missing."""
    packages = sglang_python().parents[1].glob("lib/python3*/site-packages/sglang-*.dist-info")
    return next(packages).name.removeprefix("sglang-").removesuffix(".dist-info")
