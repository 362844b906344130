"""What the target is and where it comes from."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TargetConfig(BaseModel):
    """The served LLM whose draft is trained."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: Literal["huggingface", "gguf-package", "tiny"] = Field(
        default="huggingface",
        description="`huggingface`: a Hub id or local folder. `gguf-package`: a Python package that ships one GGUF "
        "file, converted once. `tiny`: a small Llama trained in about a minute on Python's own documentation.",
    )
    name: str = Field(description="Hub id, folder, or package name.")
    revision: str | None = Field(default=None, description="Hub revision; a commit hash is best.")
    aux_layer_ids: tuple[int, ...] = Field(
        description="Target layers whose outputs feed the draft, ascending; layer l is Hugging Face "
        "hidden_states[l+1].",
        min_length=1,
    )
    add_bos: bool = Field(
        default=False,
        description="Prepend the beginning-of-text token where the tokenizer does not (Gemma's GGUF tokenizer).",
    )
    licence: str = Field(default="unknown", description="Licence of the target's weights; written into every export.")

    @property
    def hub_id(self) -> str | None:
        """Where others find the target; None where it is not on the Hub."""
        return self.name if self.source == "huggingface" and not Path(self.name).exists() else None
