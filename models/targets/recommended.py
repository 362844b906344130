"""How a target's makers say that it be sampled, which is how engines sample where a request says nothing."""

import json
from pathlib import Path
from typing import Any

from models.drafts.sampling import Sampling


def left_out(target: Path) -> str | None:
    """What `generation_config.json` names, engines apply and no figure of ours does: the caveat in one sentence.

    `min_p` is not among it: SGLang does not apply it where it verifies a draft (0.5.23).
    """
    penalty = _named(target).get("repetition_penalty") or 1.0
    if penalty == 1:
        return None
    return (
        f"the target's generation_config.json names repetition_penalty {penalty:g}, which these figures leave out: "
        "served text and its acceptance differ by it, unless requests send repetition_penalty 1"
    )


def recommended_sampling(target: Path) -> Sampling:
    """Temperature, top-k and top-p of the target's `generation_config.json`; what it does not name leaves nothing out.

    SGLang (`--sampling-defaults model`) and vLLM (`--generation-config auto`) read the same file by default. A
    temperature of 0 there is no sampling, and read as 1.
    """
    found = _named(target)
    return Sampling(
        temperature=found.get("temperature") or 1.0,
        top_p=found.get("top_p") or 1.0,
        top_k=max(0, found.get("top_k") or 0),
    )


def _named(target: Path) -> dict[str, Any]:
    file = target / "generation_config.json"
    return json.loads(file.read_text()) if file.is_file() else {}
