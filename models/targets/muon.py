"""Muon (https://kellerjordan.github.io/posts/muon/) in float32.

`torch.optim.Muon` orthogonalises in bfloat16, which a CPU without AVX-512 multiplies 16 times more slowly than float32:
there the tiny target took 25 minutes.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic iteration in the post, which maximise its slope at zero."""
ITERATIONS = 5
MOMENTUM = 0.95
WEIGHT_DECAY = 0.1


class Muon(Optimizer):
    """For matrices. Updates have the size of AdamW's (0.2 root mean square, arXiv 2502.16982)."""

    def __init__(self, matrices: Iterable[Tensor], lr: float):
        super().__init__(matrices, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One Nesterov step for every matrix that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                average = state.setdefault("average", torch.zeros_like(weight))
                average.lerp_(weight.grad, 1 - MOMENTUM)
                update = orthogonalised(weight.grad.lerp(average, MOMENTUM))
                weight.mul_(1 - group["lr"] * WEIGHT_DECAY)
                weight.add_(update, alpha=-0.2 * math.sqrt(max(weight.shape)) * group["lr"])


def orthogonalised(matrix: Tensor) -> Tensor:
    """`[m, n]` with the singular vectors of `matrix` and singular values between about 0.7 and 1.2."""
    a, b, c = NEWTON_SCHULZ
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide if matrix.shape[0] <= matrix.shape[1] else wide.T
