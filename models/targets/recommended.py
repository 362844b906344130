"""How a target's makers say that it be sampled, which is how engines sample where a request says nothing."""

import json
from pathlib import Path

from models.drafts.sampling import Sampling


def recommended_sampling(target: Path) -> Sampling:
    """Temperature, top-k and top-p of the target's `generation_config.json`; what it does not name leaves nothing out.

    SGLang (`--sampling-defaults model`) and vLLM (`--generation-config auto`) read the same file by default. A
    temperature of 0 there is no sampling, and read as 1.
    """
    file = target / "generation_config.json"
    found = json.loads(file.read_text()) if file.is_file() else {}
    return Sampling(
        temperature=found.get("temperature") or 1.0,
        top_p=found.get("top_p") or 1.0,
        top_k=max(0, found.get("top_k") or 0),
    )
