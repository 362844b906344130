"""The records of drafts: at which precision they were trained, what they started from, and where they are exported."""

from collections.abc import Mapping
from typing import Literal

from infra.records.data_path import Record

CONFIG, WEIGHTS = "config.json", "model.safetensors"
"""Files of an exported draft."""
BLOCK = "draftsmith"
"""The part of its `config.json` that is ours."""


class CapturePrecision(Record):
    """`precision.json`: at which precision hidden states are captured, which is what a draft is trained for."""

    quantization: str | None
    """Of the target: its checkpoint's, or the engine's when it loads it; None: floating-point numbers."""
    dtype: str
    engine: str
    """With its version."""
    kernels: Mapping[str, str] = {}
    """The engine's choices of kernels that decide how it rounds, by SGLang's names of the settings."""
    answering: bool = False
    """Whether most samples were captured while the target answered, so by the kernels of decoding."""

    @property
    def how(self) -> str:
        """Engine, data type, kernels and occasion, as text."""
        kernels = (f"{name} {kernel}" for name, kernel in self.kernels.items())
        return ", ".join([self.engine, self.dtype, *kernels, *(["while answering"] if self.answering else [])])


class StartRecord(Record):
    """The draft that a run's training started from."""

    draft: str
    """What `training.start_from` named; of a folder its name."""
    run: str | None
    """Run that trained it; None for a published draft."""
    target: str | None
    """Target that it was trained for; None where nobody says."""
    target_revision: str | None
    precision: CapturePrecision | None = None
    """Of that target, if it is known."""


class ExportRecord(Record):
    """An exported draft: a Hugging Face folder in serving engines' layouts."""

    path: str
    layouts: tuple[Literal["sglang", "speculators"], ...]
    """Formats of the export; empty if no engine serves the method."""
    sha256: Mapping[str, str]
    """Hash of weights and configuration, without the model card, which every benchmark rewrites."""
    started_from: StartRecord | None = None
    """None for a new draft."""
