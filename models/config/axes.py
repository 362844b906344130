"""Positions of images in a draft's layers: along one axis, as text has them, or along three."""

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from infra.refusal import Refusal
from models.config.latent import LatentShape

AXES = 3
"""Time, height and width."""
Pairs = Annotated[int, Field(ge=0, le=4096)]


class AxialShape(LatentShape):
    """Settings of methods that read the embeddings of images (arXiv 2409.12191, section 2.1)."""

    mrope_section: tuple[Pairs, Pairs, Pairs] | None = Field(
        default=None,
        description="How many rotated pairs of a head turn by the time, the height and the width of a part of an "
        "image, as in targets that have this setting. On text the three are equal. Default: the parts of an image are "
        "counted one after the other, like text.",
    )
    mrope_interleaved: bool = Field(
        default=False, description="Pairs of the three axes take turns (Qwen3-VL), not one axis after the other."
    )

    @model_validator(mode="after")
    def _axes_share_the_pairs(self) -> Self:
        section = self.mrope_section
        if section is None:
            if self.mrope_interleaved:
                raise Refusal("draft.mrope_interleaved: there is no draft.mrope_section, so leave it out")
            return self
        if sum(section) != self.rotary_dim // 2:
            raise Refusal(
                f"draft.mrope_section {list(section)} has {sum(section)} pairs, and {self.rotary_dim // 2} of a head "
                "are rotated: take the target's setting with the target's head_dim and partial_rotary_factor"
            )
        if self.rope_scaling is not None:
            raise Refusal("draft.rope_scaling is ignored by engines where mrope_section is set: leave one of them out")
        return self

    @property
    def axes(self) -> list[int] | None:
        """The axis of each rotated pair; None where there is only one axis."""
        section, count = self.mrope_section, self.rotary_dim // 2
        if section is None:
            return None
        if not self.mrope_interleaved:
            return [axis for axis, pairs in enumerate(section) for _ in range(pairs)]
        return [pair % AXES if pair < AXES * section[pair % AXES] else 0 for pair in range(count)]

    def engine_layers(self, hidden_size: int, vocab_size: int) -> dict[str, Any]:
        """See `LayerShape.engine_layers`."""
        found = super().engine_layers(hidden_size, vocab_size)
        if self.mrope_section is not None:
            own = {"mrope_section": list(self.mrope_section), "mrope_interleaved": self.mrope_interleaved}
            found["rope_parameters"] |= own
        return found
