"""The hidden states of texts. Free of transformers: SGLang's environment has another version of it."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class HiddenStates:
    """Captured hidden states: `aux` `[..., T, K*H]` and `last` `[..., T, H]`, in the target's compute dtype."""

    aux: Tensor
    last: Tensor
    top: Tensor | None = None
    """`[..., T]` int32 the target's own next token, with the greatest logit of its whole vocabulary; None where no
    draft asks for it."""

    def named(self) -> dict[str, Tensor]:
        """The tensors that are there, by name."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}

    def rows(self, rows: slice) -> "HiddenStates":
        """Some positions of one sample; views."""
        return HiddenStates(**{name: tensor[rows] for name, tensor in self.named().items()})
