"""Registry of the draft methods' settings, from which `draft.method` of a recipe chooses."""

from collections.abc import Mapping
from typing import Annotated, Any, get_args

from pydantic import Field, TypeAdapter

from models.config.dflash import DFlashConfig
from models.config.dflash2 import DFlash2Config
from models.config.domino import DominoConfig
from models.config.draft_base import MethodConfig
from models.config.dspark import DSparkConfig
from models.config.eagle3 import Eagle3Config
from models.config.medusa import MedusaConfig
from models.config.mtp import MtpConfig

DraftConfig = Annotated[
    DFlashConfig
    | DFlash2Config
    | DominoConfig
    | DSparkConfig
    | Eagle3Config
    | MedusaConfig
    | MtpConfig,
    Field(discriminator="method"),
]  # fmt: skip

METHODS: dict[str, type[MethodConfig]] = {
    config.model_fields["method"].default: config for config in get_args(get_args(DraftConfig)[0])
}
"""Configurations by method; the name is also the method's folder."""


def parse_draft_config(tree: Mapping[str, Any]) -> DraftConfig:
    """The settings in a checkpoint or an export. Raises ValidationError, which is a ValueError."""
    return TypeAdapter(DraftConfig).validate_python(tree)
