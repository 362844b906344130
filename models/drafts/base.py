"""What every draft method offers: training loss, proposals while decoding, and a rollout from every position."""

from typing import Protocol

import torch
from torch import Tensor


class Proposer(Protocol):
    """Proposes tokens for one sequence while it is decoded; holds the draft's own cache."""

    def propose(self, sequence: Tensor, aux: Tensor, lookahead: int) -> Tensor:
        """Propose the next `lookahead` tokens.

        Args:
            sequence: `[t + 1]` int64, every token emitted so far; the last one has not been through the target.
            aux: `[n, K*H]`, target features of positions `t - n .. t - 1`, which this proposer has not seen yet.
            lookahead: number of tokens to propose, at least 1.

        Returns:
            `[lookahead]` int64, target-vocabulary ids.
        """
        ...


class ProposalSource(Protocol):
    """Anything that proposes tokens: a draft, or a training-free baseline."""

    def proposer(self) -> Proposer:
        """A fresh proposer for one sequence."""
        ...

    def rollout(self, tokens: Tensor, aux: Tensor, lookahead: int) -> Tensor:
        """Proposals from every position of one sequence at once, equal to what a proposer would say there.

        Args:
            tokens: `[T + 1]` int64.
            aux: `[T, K*H]` target features of positions 0..T-1.
            lookahead: number of tokens proposed from each position.

        Returns:
            `[T, lookahead]` int64; row i is proposed when `tokens[: i + 2]` are emitted, so its first token
            stands for position i + 2.
        """
        ...


class Draft(torch.nn.Module):
    """A draft model. Subclasses are `models/drafts/<method>/module.py`."""

    aux_layer_ids: tuple[int, ...]

    def proposer(self) -> Proposer:
        raise NotImplementedError

    def rollout(self, tokens: Tensor, aux: Tensor, lookahead: int) -> Tensor:
        raise NotImplementedError
