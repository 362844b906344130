"""The hidden states of texts. Free of transformers: SGLang's environment has another version of it."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class HiddenStates:
    """Captured hidden states in the target's compute dtype: `aux` `[..., T, K*H]`, K >= 0, and `last` `[..., T, H]`."""

    aux: Tensor
    last: Tensor
    top: Tensor | None = None
    """`[..., T]` int32 the target's own next token, with the greatest logit of its whole vocabulary; None where no
    draft asks for it."""
    embedded: Tensor | None = None
    """`[..., T, H]` what the target's first layer read: of a text's tokens their embeddings, of an image's tokens what
    the vision model says of them. None where no draft asks for it. In texts without images it may be anything."""
    places: Tensor | None = None
    """`[..., T, 3]` int32 where it stands in time, height and width, by the target's own count; None where `embedded`
    is."""

    @property
    def features(self) -> Tensor:
        """What a draft reads of every position: the captured layers, or the last states where there are none."""
        return self.aux if self.aux.shape[-1] else self.last

    def named(self) -> dict[str, Tensor]:
        """The tensors that are there, by name."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}

    def rows(self, rows: slice) -> "HiddenStates":
        """Some positions of one sample; views."""
        return HiddenStates(**{name: tensor[rows] for name, tensor in self.named().items()})
