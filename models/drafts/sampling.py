"""How the next token is chosen: the only place that applies temperature, top-k and top-p."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from infra.refusal import Refusal

FEW = 1024
"""Most likely tokens among which a nucleus is looked for first."""


@dataclass(frozen=True)
class Sampling:
    """Temperature 0 is greedy; otherwise tokens are drawn after temperature, top-k and, then, top-p.

    Raises Refusal for a negative temperature or top-k, or a top-p outside (0, 1].
    """

    temperature: float = 0.0
    top_p: float = 1.0
    generator: torch.Generator | None = None
    """Random generator on the device of the distributions; None: torch's own."""
    top_k: int = 0
    """Most likely tokens that are kept; 0 keeps all."""

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise Refusal(f"temperature {self.temperature}: 0 is greedy, 1 the model's own distribution")
        if not 0 < self.top_p <= 1:
            raise Refusal(f"top-p {self.top_p}: give a probability above 0, at most 1 (1 leaves nothing out)")
        if self.top_k < 0:
            raise Refusal(f"top-k {self.top_k}: give a number of tokens (0 leaves nothing out)")

    def seeded(self, seed: int, device: torch.device) -> "Sampling":
        """The same law with a generator of its own."""
        return replace(self, generator=torch.Generator(device).manual_seed(seed))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def distribution(self, logits: Tensor) -> Tensor:
        """Probabilities after temperature, top-k and top-p, each on what the one before it left, as engines verify.

        Top-p (nucleus sampling, Holtzman et al., arXiv 1904.09751) keeps the smallest set of most likely tokens whose
        probabilities reach `top_p` together, the one that reaches it included.

        Args:
            logits: `[..., V]`, taken as float32; the temperature must not be 0.

        Returns:
            `[..., V]` float32.
        """
        assert not self.greedy
        probabilities = (logits.float() / self.temperature).softmax(-1)
        if self.top_p == 1 and not self.top_k:
            return probabilities
        likely, tokens = self._likeliest(probabilities)
        if self.top_p < 1:
            before = likely.cumsum(-1, dtype=torch.double) - likely
            likely = likely.masked_fill(before >= self.top_p, 0)
            likely = likely / likely.sum(-1, keepdim=True)
        return torch.zeros_like(probabilities).scatter(-1, tokens, likely)

    def drafted(self, logits: Tensor) -> Tensor:
        """What a draft with `logits` `[..., V]` proposes from: `[..., V]` float32, after temperature alone.

        So do SGLang (0.5.23: DSpark, DFlash 2) and vLLM: top-k and top-p are the target's, which rejects what they
        leave out. With a top-k of 1, a greedy request, SGLang proposes the likeliest token.
        """
        return replace(self, top_p=1.0, top_k=1 if self.top_k == 1 else 0).distribution(logits)

    def _likeliest(self, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities, which sum to 1, and tokens in descending order, at least all of every row's nucleus."""
        if self.top_k:
            likely, tokens = probabilities.topk(min(self.top_k, probabilities.shape[-1]), dim=-1)
            return likely / likely.sum(-1, keepdim=True), tokens
        # Sorting a vocabulary of 262,144 takes longer than a small target's forward; a nucleus seldom needs it.
        likely, tokens = probabilities.topk(min(FEW, probabilities.shape[-1]), dim=-1)
        if bool((likely.sum(-1, dtype=torch.double) >= self.top_p).all()):
            return likely, tokens
        return probabilities.sort(dim=-1, descending=True)

    def draw(self, weights: Tensor) -> Tensor:
        """Draw one token per row in proportion to `weights` `[..., V]`, which need not sum to 1: `[...]` int64."""
        rows = weights.shape[:-1]
        return draw_by(weights, torch.rand(rows, dtype=torch.double, device=weights.device, generator=self.generator))

    def choose(self, logits: Tensor) -> Tensor:
        """The next token of each row of `[..., V]` logits: `[...]` int64."""
        return logits.argmax(-1) if self.greedy else self.draw(self.distribution(logits))


GREEDY = Sampling()


def draw_by(weights: Tensor, chances: Tensor) -> Tensor:
    """The tokens that `chances` `[...]` in [0, 1) draw in proportion to `weights` `[..., V]`: `[...]` int64."""
    # Inverse of the cumulative distribution; torch.multinomial takes seconds for a large vocabulary on a CPU.
    cumulative = weights.cumsum(-1, dtype=torch.double)
    # In (0, 1], so that the first place to reach its share never is a token of weight 0.
    shares = (1 - chances).unsqueeze(-1)
    return torch.searchsorted(cumulative, shares * cumulative[..., -1:]).squeeze(-1)


def chances(samplings: Sequence[Sampling], counts: Sequence[int], device: torch.device) -> Tensor:
    """`[B, max(counts)]` float64 in [0, 1): row i holds `counts[i]` draws from its own generator, zero-padded.

    What a row draws does not depend on the others, unless they share its generator.
    """
    rows: dict[int, list[int]] = {}
    for row, sampling in enumerate(samplings):
        rows.setdefault(id(sampling.generator), []).append(row)
    found = torch.zeros(len(counts), max(counts), dtype=torch.double, device=device)
    for own in rows.values():
        sizes = [counts[row] for row in own]
        drawn = torch.rand(sum(sizes), dtype=torch.double, device=device, generator=samplings[own[0]].generator)
        found[own, : max(sizes)] = pad_sequence(list(drawn.split(sizes)), batch_first=True)
    return found
