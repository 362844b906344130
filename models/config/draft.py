"""The configurations of all draft methods: one registry line per method, which `draft.method` of a recipe chooses."""

from collections.abc import Mapping
from typing import Annotated, Any, get_args

from pydantic import Field, TypeAdapter

from models.config.dflash import DFlashConfig
from models.config.draft_base import MethodConfig
from models.config.eagle3 import Eagle3Config
from models.config.medusa import MedusaConfig

DraftConfig = Annotated[
    DFlashConfig
    | Eagle3Config
    | MedusaConfig,
    Field(discriminator="method"),
]  # fmt: skip

METHODS: dict[str, type[MethodConfig]] = {
    config.model_fields["method"].default: config for config in get_args(get_args(DraftConfig)[0])
}
"""By the name of their folder."""


def parse_draft_config(tree: Mapping[str, Any]) -> DraftConfig:
    """The configuration that a checkpoint or an export holds. Raises pydantic's ValidationError, a ValueError."""
    return TypeAdapter(DraftConfig).validate_python(tree)
