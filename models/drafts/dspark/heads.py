"""DSpark's heads: a bias by the tokens before, and how likely a proposal is to be accepted (arXiv 2607.05147)."""

import torch
from torch import Tensor, nn

from models.config.dspark import DSparkConfig


class MarkovHead(nn.Module):
    """A bias of low rank on a proposal's logits, from the token before it: `W2 W1[x]`.

    Args:
        config: rank and kind.
        vocabulary: V, tokens of the target.
        proposed: Vd, tokens of the draft vocabulary.
        hidden_size: H.
    """

    def __init__(self, config: DSparkConfig, vocabulary: int, proposed: int, hidden_size: int):
        super().__init__()
        rank = config.markov_rank
        self.markov_w1 = nn.Embedding(vocabulary, rank)
        self.markov_w2 = nn.Linear(rank, proposed, bias=False)
        # Latents of about length 1, and no bias at first: the draft begins as its backbone.
        nn.init.normal_(self.markov_w1.weight, std=rank**-0.5)
        nn.init.zeros_(self.markov_w2.weight)

    def embed(self, previous: Tensor) -> Tensor:
        """`W1[x]` of tokens `[...]`: `[..., r]`."""
        return self.markov_w1(previous)

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The latent `[n, r]` of one proposal, whose bias is `W2` times it, and what the next one's depends on.

        Args:
            previous: `[n]` int64 target ids of the tokens before.
            hidden: `[n, H]` normed hidden states of the proposals' rows.
            state: of the step before; None at the block's first.
        """
        return self.embed(previous), state

    def along(self, previous: Tensor, hidden: Tensor) -> Tensor:
        """Latents `[A, S, r]` of whole blocks, given the tokens before `[A, S]` and hidden states `[A, S, H]`."""
        latents, state = list[Tensor](), None
        for step in range(previous.shape[1]):
            latent, state = self.step(previous[:, step], hidden[:, step], state)
            latents.append(latent)
        return torch.stack(latents, dim=1)


class GatedMarkovHead(MarkovHead):
    """With a gate on the latent by the row's hidden state and the token before: `W2 (sigmoid(G [h; e]) * e)`."""

    def __init__(self, config: DSparkConfig, vocabulary: int, proposed: int, hidden_size: int):
        super().__init__(config, vocabulary, proposed, hidden_size)
        self.gate_proj = nn.Linear(hidden_size + config.markov_rank, config.markov_rank)

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        embedded = self.embed(previous)
        return self.gate_proj(torch.cat([hidden, embedded], dim=-1)).sigmoid() * embedded, state


class RecurrentMarkovHead(MarkovHead):
    """With a state that passes through the block: of `J [s; e; h]`, a gate, a candidate and what is put out."""

    def __init__(self, config: DSparkConfig, vocabulary: int, proposed: int, hidden_size: int):
        super().__init__(config, vocabulary, proposed, hidden_size)
        rank = config.markov_rank
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def step(self, previous: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        embedded = self.embed(previous)
        state = torch.zeros_like(embedded) if state is None else state
        joint = self.joint_proj(torch.cat([state, embedded, hidden], dim=-1))
        gate, candidate, out = joint.chunk(3, dim=-1)
        gate = gate.sigmoid()
        return out.tanh(), gate * state + (1 - gate) * candidate.tanh()


MARKOV_HEADS = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RecurrentMarkovHead}


class ConfidenceHead(nn.Module):
    """The logit of a proposal's acceptance rate, from its row's hidden state and perhaps the token before."""

    def __init__(self, hidden_size: int, rank: int):
        super().__init__()
        self.proj = nn.Linear(hidden_size + rank, 1)

    def forward(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """`[..., H]` and `[..., r]` to `[...]`."""
        features = hidden if embedded is None else torch.cat([hidden, embedded.to(hidden.dtype)], dim=-1)
        return self.proj(features).squeeze(-1)
