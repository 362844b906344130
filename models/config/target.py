"""What the target is and where it comes from."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from infra.config import Address, StrictConfig


class TargetConfig(StrictConfig):
    """The served LLM whose draft is trained."""

    source: Literal["huggingface", "gguf-package", "tiny"] = Field(
        default="huggingface",
        description="`huggingface`: a Hub id or local folder. `gguf-package`: a Python package with one GGUF file, "
        "which is converted once. `tiny`: a small Llama, trained in a minute or two on Python's own documentation.",
    )
    name: Address = Field(description="Hub id, folder, or package name.")
    revision: str | None = Field(default=None, description="Hub revision, best a commit hash; default: the newest.")
    aux_layer_ids: tuple[Annotated[int, Field(ge=0, lt=10_000)], ...] = Field(
        max_length=64,
        description="Target layers whose outputs feed the draft, ascending; layer l is Hugging Face's "
        "hidden_states[l+1]. Default in a recipe file: by the target's number of layers. `[]` with draft.method=mtp, "
        "which reads the last hidden state after the final norm.",
    )
    add_bos: bool = Field(
        default=False,
        description="Prepend the beginning-of-text token where the tokenizer does not (Gemma's GGUF tokenizer).",
    )
    licence: str = Field(default="unknown", description="Licence of the target's weights, written into every export.")

    @property
    def hub_id(self) -> str | None:
        """The target's id on the Hub; None for a local target."""
        is_local = self.name.startswith(("~", "/", ".")) or Path(self.name).exists()
        return None if is_local or self.source != "huggingface" else self.name


@dataclass(frozen=True)
class TinyRecipe:
    """Everything that decides the tiny target, apart from the documentation itself (models/targets/tiny.py)."""

    format: int = 2
    vocab_size: int = 1024
    hidden_size: int = 192
    intermediate_size: int = 512
    layers: int = 4
    heads: int = 6
    kv_heads: int = 3
    every: int = 6
    """Trains on every sixth document: seen more than twice, they leave text that loops far less when greedy."""
    steps: int = 500
    batch: int = 4
    length: int = 192
    matrix_learning_rate: float = 5e-3
    learning_rate: float = 8e-3
    warmup: int = 20
    decay_share: float = 0.6
    seed: int = 0
