"""The configurations of all draft methods: one registry line per method, which `draft.method` of a recipe chooses."""

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from models.drafts.base_config import MethodConfig
from models.drafts.eagle3.config import Eagle3Config

DraftConfig = Eagle3Config

METHODS: dict[str, type[MethodConfig]] = {"eagle3": Eagle3Config}


def parse_draft_config(tree: Mapping[str, Any]) -> DraftConfig:
    """The configuration that a checkpoint or an export holds. Raises pydantic's ValidationError, a ValueError."""
    return TypeAdapter(DraftConfig).validate_python(tree)
