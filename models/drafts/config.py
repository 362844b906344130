"""The configurations of all draft methods: one registry line per method."""

from typing import Annotated

from pydantic import Field

from models.drafts.dflash.config import DFlashConfig
from models.drafts.eagle3.config import Eagle3Config

DraftConfig = Annotated[Eagle3Config | DFlashConfig, Field(discriminator="method")]
