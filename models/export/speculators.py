"""What vLLM and the package `speculators` (0.9.0) read of an export's `config.json`.

The same folder, with the same weights, is SGLang's: both name tensors alike, and neither minds the other's settings.
"""

import json
from pathlib import Path
from typing import Any

from models.drafts.base import Draft
from models.export.description import CONFIG

VERSION = "0.9.0"
"""Version of the format."""


def speculators_settings(draft: Draft, target: Path, hub_id: str | None, lookahead: int) -> dict[str, Any] | None:
    """Their part of `config.json`; None for a draft that they have no layout for.

    Args:
        draft: what is exported.
        target: the target's Hugging Face folder.
        hub_id: where others find the target; None where it is not on the Hub (a path of this machine is no use there).
        lookahead: tokens that vLLM proposes per step, unless told otherwise.
    """
    settings = draft.speculators_config()
    if settings is None:
        return None
    verifier = {
        "name_or_path": hub_id,
        "architectures": json.loads((target / CONFIG).read_text()).get("architectures") or [],
    }
    return settings | {
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": settings["speculators_model_type"],
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": lookahead}],
            "default_proposal_method": "greedy",
            "verifier": verifier,
        },
    }
