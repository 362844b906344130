"""Muon (https://kellerjordan.github.io/posts/muon/): matrices step in the direction of their orthogonalised gradients.

`torch.optim.Muon` orthogonalises in bfloat16, which a CPU without units for it multiplies up to 16 times more slowly
than float32: there the tiny target took 25 minutes.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.adamw import adamw

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration in the post, which maximise its slope at zero."""
ITERATIONS = 5
"""Three, with minimax coefficients (arXiv 2505.16932) and a closer bound of the norm, took 13 % less time of a training
on Gemma 3 270M (157,000 tokens, two seeds), and its acceptance length was 2 % shorter."""
MOMENTUM = 0.95
EPSILON = 1e-8
"""AdamW's."""


class MuonAndAdamW(Optimizer):
    """Muon for matrices, AdamW for all other weights.

    Args:
        matrices: weights `[m, n]` whose rows and columns are directions of hidden states, or stacks of them.
        others: vectors, and tables that have a row for each token.
        lr: peak learning rate of both, whose updates are of one size.
        betas: AdamW's.
        weight_decay: of both, times the learning rate.
        orthogonalise: of a matrix, or of each one in a stack; it may gather it from several ranks first.
    """

    def __init__(
        self,
        matrices: list[torch.nn.Parameter],
        others: list[torch.nn.Parameter],
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
        orthogonalise: Callable[[Tensor], Tensor],
    ):
        groups = [{"params": matrices}, {"params": others, "fused": True}]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})
        self._betas, self._orthogonalise = betas, orthogonalise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of all weights that have a gradient; returns what `closure`, which computes them, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        matrices, others = self.param_groups
        for weight in matrices["params"]:
            if weight.grad is not None:
                update = self._orthogonalise(nesterov(weight, self.state[weight]))
                take_step(weight, update, matrices["lr"], matrices["weight_decay"])
        self._step_others(others)
        return loss

    def _step_others(self, group: dict[str, Any]) -> None:
        weights = [weight for weight in group["params"] if weight.grad is not None]
        if not weights:
            return
        for weight in weights:
            if not self.state[weight]:
                self.state[weight] = {
                    "step": torch.zeros((), device=weight.device),
                    "exp_avg": torch.zeros_like(weight),
                    "exp_avg_sq": torch.zeros_like(weight),
                }
        states = [self.state[weight] for weight in weights]
        first, second, steps = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "step"))
        beta1, beta2 = self._betas
        adamw(
            weights, [weight.grad for weight in weights], first, second, [], steps, fused=True, amsgrad=False,
            beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=EPSILON, maximize=False,
        )  # fmt: skip


def nesterov(weight: Tensor, state: dict[str, Tensor]) -> Tensor:
    """The gradient with Nesterov's momentum, whose average is kept in `state`."""
    assert weight.grad is not None
    if "average" not in state:
        state["average"] = torch.zeros_like(weight)
    state["average"].lerp_(weight.grad, 1 - MOMENTUM)
    return weight.grad.lerp(state["average"], MOMENTUM)


def take_step(weight: Tensor, update: Tensor, learning_rate: float, weight_decay: float) -> None:
    """Against an orthogonal update `[..., m, n]`, which is given the size of AdamW's (arXiv 2502.16982)."""
    weight.mul_(1 - learning_rate * weight_decay)
    weight.add_(update, alpha=-0.2 * math.sqrt(max(weight.shape[-2:])) * learning_rate)


def orthogonalised(matrix: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """`[m, n]` with the singular vectors of `matrix` and singular values between about 0.7 and 1.2.

    Of a stack `[e, m, n]`, each by itself. Computed in `dtype`; singular values are as good in bfloat16.
    """
    a, b, c = NEWTON_SCHULZ
    tall, product = matrix.shape[-2] > matrix.shape[-1], torch.addmm if matrix.ndim == 2 else torch.baddbmm
    wide = matrix.mT if tall else matrix
    wide = (wide / torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True).clamp(min=1e-7)).to(dtype)
    for _ in range(ITERATIONS):
        gram = wide @ wide.mT
        wide = product(wide, product(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return (wide.mT if tall else wide).to(matrix.dtype)
