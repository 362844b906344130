"""An exported draft's `config.json`: our block `draftsmith`, and what vLLM and `speculators` (0.9.0) read of it.

SGLang reads the same folder: tensors have the same names for all three, and each ignores the others' settings.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from infra.records.drafts import BLOCK, CONFIG, CapturePrecision, StartRecord
from infra.refusal import Refusal
from models.config.draft import DraftConfig, parse_draft_config
from models.drafts.base import Draft
from models.export.served_target import ServedTarget
from models.run import RunWithTarget

SGLANG: Literal["sglang"] = "sglang"
SPECULATORS: Literal["speculators"] = "speculators"
FLOATS = "floating-point numbers"
SPECULATORS_VERSION = "0.9.0"
"""Version of the format."""


LATENT = "Eagle3DeepseekV2ForCausalLM"
VLLM_ARCHITECTURES = {
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash",
    "Qwen3DSparkModel": "dspark",
    LATENT: "eagle3",
}
"""What vLLM (0.32.0) reads as SGLang does, without the `speculators` part: the architecture, and its method's name."""


@dataclass(frozen=True)
class ExportDescription:
    """An exported draft, without its weights."""

    config: DraftConfig
    aux_layer_ids: tuple[int, ...]
    target_vocab_size: int
    dtype: str
    """Data type of its weights."""
    served: bool
    """Whether SGLang serves it."""
    vllm_method: str | None
    """vLLM's name of the method; None where it cannot read the draft."""
    target_revision: str | None
    precision: CapturePrecision | None = None
    """At which precision of its target it was trained; None where nobody knows."""


def block_of(
    config: DraftConfig, aux_layer_ids: tuple[int, ...], target_vocab_size: int, *, served: bool
) -> dict[str, Any]:
    """The part of the block `draftsmith` that a draft is built from again."""
    return {
        "draft": config.model_dump(mode="json"),
        "aux_layer_ids": list(aux_layer_ids),
        "target_vocab_size": target_vocab_size,
        "served_by": [SGLANG] if served else [],
    }


def read_description(folder: Path) -> ExportDescription:
    """Read `config.json`. Raises Refusal for a folder that is not an export of ours."""
    if not (folder / CONFIG).is_file():
        raise Refusal(f"{folder} is not an exported draft (no {CONFIG}): give the export folder of a run")
    settings = json.loads((folder / CONFIG).read_text())
    block = settings.get(BLOCK, {})
    if "served_by" not in block or "dtype" not in settings:
        raise Refusal(
            f"{folder}/{CONFIG} does not say how the draft is built (no {BLOCK}.served_by, or no dtype): give the "
            "export folder of a run"
        )
    try:
        config = parse_draft_config(block["draft"])
    except ValidationError as error:
        raise Refusal(f"{folder}/{CONFIG} is of another version of Draftsmith: {error}") from error
    return ExportDescription(
        config=config,
        aux_layer_ids=tuple(block["aux_layer_ids"]),
        target_vocab_size=block["target_vocab_size"],
        dtype=settings["dtype"],
        served=SGLANG in block["served_by"],
        vllm_method=vllm_method(settings),
        target_revision=block.get("target_revision"),
        precision=_precision(block),
    )


def vllm_method(settings: Mapping[str, Any]) -> str | None:
    """vLLM's name of the method of an export with this `config.json`; None where it cannot read it."""
    architectures = settings.get("architectures") or ()
    if LATENT in architectures and not settings["draft_vocab_size"]:
        return None  # the target's whole head, which SGLang alone is told so
    if settings.get("markov_head_type", "vanilla") != "vanilla":
        return None  # model_executor/models/qwen3_dspark.py has the one head, whatever it reads
    if settings.get("dflash_config", {}).get("projector_type", "dflash") != "dflash":
        return None  # model_executor/models/qwen3_dflash.py would read a Domino draft as DFlash's
    named = (VLLM_ARCHITECTURES.get(name) for name in architectures)
    return settings.get("speculators_model_type") or next(named, None)


def _precision(block: dict[str, Any]) -> CapturePrecision | None:
    stored = block.get("precision")
    return None if stored is None else CapturePrecision.model_validate(stored)


def check_precision(draft: Path, quantization: str | None) -> None:
    """Raise Refusal unless `draft` was trained for a target that is quantized like this, or nobody knows."""
    precision = read_description(draft).precision
    if precision is not None and precision.quantization != quantization:
        raise Refusal(
            f"{draft} was trained on hidden states of its target in {precision.quantization or FLOATS}, and here the "
            f"target is in {quantization or FLOATS}: its acceptance would be another one; use that target, or train a "
            "draft at this precision"
        )


def start_of(run: RunWithTarget) -> StartRecord | None:
    """The draft that the run's training started from; None for a new one."""
    if not run.folder.start.is_dir():
        return None
    block, named = json.loads((run.folder.start / CONFIG).read_text())[BLOCK], str(run.config.training.start_from)
    return StartRecord(
        draft=Path(named).name if Path(named).expanduser().is_dir() else named,
        run=block.get("run"),
        target=block.get("target"),
        target_revision=block.get("target_revision"),
        precision=_precision(block),
    )


def speculators_settings(
    draft: Draft, target: ServedTarget, hub_id: str | None, lookahead: int
) -> dict[str, Any] | None:
    """The part of `config.json` that vLLM and `speculators` read; None for a draft that they have no layout for.

    Args:
        draft: what is exported.
        target: the target as it is served.
        hub_id: where others find the target; None where it is not on the Hub (a path of this machine is no use there).
        lookahead: tokens that vLLM proposes per step, unless told otherwise.
    """
    settings = draft.speculators_config()
    if settings is None:
        return None
    return settings | {
        "transformer_layer_config": settings["transformer_layer_config"] | target.settings,
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": settings["speculators_model_type"],
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": lookahead}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": hub_id, "architectures": list(target.architectures)},
        },
    }
