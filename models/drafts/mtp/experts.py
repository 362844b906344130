"""Mixtures of experts (DeepSeek-V3, arXiv 2412.19437, section 2.1.2; Qwen3-Next)."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config.experts import Experts
from models.drafts.layers import GatedMLP, GatedWeights
from models.drafts.products import GradientSum, SharedWeight
from models.drafts.row_functions import gated, gated_backward

BIAS = "e_score_correction_bias"


class Router(nn.Module):
    """Which experts read a row, and the factors of what they give; computed in float32 or more."""

    def __init__(self, config: Experts, hidden_size: int):
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.zeros(config.count, hidden_size))
        if config.scoring == "sigmoid":
            self.register_buffer(BIAS, torch.zeros(config.count))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        """The bias stays float32, as in engines: rounded, it would choose other experts."""
        bias = self._buffers.get(BIAS)
        super()._apply(fn, recurse)
        if bias is not None:
            self._buffers[BIAS] = bias.to(self.weight.device)
        return self

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Chosen experts `[n, k]` and their factors `[n, k]`, at least float32, of rows `[n, H]`."""
        config = self.config
        with torch.autocast(x.device.type, enabled=False):
            wide = torch.promote_types(x.dtype, torch.float32)
            logits = F.linear(x.to(wide), self.weight.to(wide))
            scores = logits.softmax(-1) if config.scoring == "softmax" else logits.sigmoid()
            chosen = self._choose(scores.detach())
            factors = scores.gather(1, chosen)
            if config.normed:
                factors = factors / (factors.sum(-1, keepdim=True) + 1e-20)
            return chosen, factors * config.scaling

    def _choose(self, scores: Tensor) -> Tensor:
        config = self.config
        if config.scoring == "sigmoid":
            scores = scores + self.get_buffer(BIAS)
        if config.groups > 1:
            grouped = scores.unflatten(-1, (config.groups, -1))
            best = grouped.topk(2).values.sum(-1).topk(config.groups_per_token).indices
            left = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, value=False)
            scores = grouped.masked_fill(left.unsqueeze(-1), -torch.inf).flatten(1)
        return scores.topk(config.per_token).indices


class ExpertTables(nn.Module):
    """All experts' weights: `gate_up_proj` `[E, 2I, H]`, gates first, and `down_proj` `[E, H, I]`."""

    def __init__(self, config: Experts, hidden_size: int):
        super().__init__()
        count, size = config.count, config.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.zeros(count, 2 * size, hidden_size))
        self.down_proj = nn.Parameter(torch.zeros(count, hidden_size, size))


class MixtureOfExperts(nn.Module):
    """The feed-forward part of a layer with experts."""

    def __init__(self, config: Experts, hidden_size: int):
        super().__init__()
        self.gate = Router(config, hidden_size)
        self.experts = ExpertTables(config, hidden_size)
        if config.shared_size:
            self.shared_expert = GatedMLP(hidden_size, config.shared_size)
        if config.gates_shared:
            self.shared_expert_gate = nn.Linear(hidden_size, 1, bias=False)

    def weights(self) -> "ExpertWeights":
        """For one pass, in which the layer may run several times."""
        tables, shared = self.experts, getattr(self, "shared_expert", None)
        return ExpertWeights(
            self.gate,
            SharedWeight(tables.gate_up_proj),
            SharedWeight(tables.down_proj),
            None if shared is None else shared.weights(),
            getattr(self, "shared_expert_gate", None),
        )


class ExpertWeights(NamedTuple):
    """`MixtureOfExperts`'s weights."""

    router: Router
    gate_up: SharedWeight
    down: SharedWeight
    shared: GatedWeights | None
    shared_gate: nn.Linear | None

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual + experts(x)`, `[n, H]`."""
        chosen, factors = self.router(x)
        sums = [self.gate_up.gradient, self.down.gradient]
        residual = residual + _Chosen.apply(sums, chosen, x, factors, self.gate_up.value, self.down.value)  # type: ignore[operator]
        if self.shared is None:
            return residual
        if self.shared_gate is None:
            return self.shared.add_to(residual, x)
        of_shared = self.shared.add_to(torch.zeros_like(residual), x)
        return residual + of_shared * torch.sigmoid(self.shared_gate(x))


class _Chosen(torch.autograd.Function):
    """The chosen experts' outputs times their factors, summed. Rows are sorted by expert, so that each product of all
    experts is one call; the backward pass sorts and activates them again."""

    @staticmethod
    def forward(ctx: Any, sums: Sequence[GradientSum], chosen: Tensor, *rest: Tensor) -> Tensor:
        x, factors, gate_up, down = rest
        by_expert = chosen.flatten().sort(stable=True)
        experts = torch.arange(len(gate_up), device=x.device)
        ends = torch.searchsorted(by_expert.values, experts, right=True).int()
        order, each = by_expert.indices, chosen.shape[1]
        with torch.autocast(x.device.type, enabled=False):
            both = grouped(x[order // each], gate_up.mT, ends)
            active = gated(*_halves(both)) * _sorted(factors, order)
            outputs = grouped(active.to(x.dtype), down.mT, ends)
        ctx.sums, ctx.each = sums, each
        ctx.save_for_backward(x, order, ends, factors, both, gate_up, down)
        return _together(outputs, order, each)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, order, ends, factors, both, gate_up, down = ctx.saved_tensors
        (gate, up), factor = _halves(both), _sorted(factors, order)
        read, slope = x[order // ctx.each], gradients[0].to(x.dtype)[order // ctx.each]
        of_active = grouped(slope, down, ends)
        plain = gated(gate, up)
        of_factor = (of_active * plain).sum(-1, dtype=factor.dtype)
        _, of_gate, of_up = gated_backward((of_active * factor).to(x.dtype), gate, up)
        of_both = torch.cat([of_gate, of_up], dim=-1)
        wanted = ctx.needs_input_grad
        if wanted[5]:
            ctx.sums[1].add_whole(grouped(slope.T, (plain * factor).to(x.dtype), ends))
        if wanted[4]:
            ctx.sums[0].add_whole(grouped(of_both.T, read, ends))
        of_x = _together(grouped(of_both, gate_up, ends), order, ctx.each)
        return None, None, of_x, _unsorted(of_factor, order).view_as(factors), None, None


def grouped(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Products of groups of rows `[n, in]` with matrices `[E, in, out]`, or, for `[in, n]` and `[n, out]`, of groups of
    columns with groups of rows, `[E, in, out]`. `ends` `[E]` int32 are where the groups end.

    On a CPU a call for each group is as fast, and takes every size and dtype.
    """
    if rows.device.type != "cpu":
        return F.grouped_mm(rows, matrices, offs=ends)
    starts, stops = [0, *ends[:-1].tolist()], ends.tolist()
    places = [slice(*place) for place in zip(starts, stops, strict=True)]
    if matrices.ndim == 3:
        return torch.cat([rows[place] @ matrix for place, matrix in zip(places, matrices, strict=True)])
    return torch.stack([rows[:, place] @ matrices[place] for place in places])


def _halves(both: Tensor) -> tuple[Tensor, Tensor]:
    gate, up = both.chunk(2, dim=-1)
    return gate.contiguous(), up.contiguous()


def _sorted(factors: Tensor, order: Tensor) -> Tensor:
    """`[n * k, 1]`, in the order of experts."""
    return factors.flatten()[order].unsqueeze(-1)


def _unsorted(values: Tensor, order: Tensor) -> Tensor:
    """Rows `[n * k, ...]` in the order that they had before they were sorted."""
    return torch.empty_like(values).index_copy_(0, order, values)


def _together(outputs: Tensor, order: Tensor, each: int) -> Tensor:
    """`[n, H]` sums of the rows' `each` outputs, which come in the order of experts."""
    return _unsorted(outputs, order).unflatten(0, (-1, each)).sum(1)
