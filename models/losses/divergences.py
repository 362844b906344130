"""Divergences of a draft's distribution q from the target's p, over the draft vocabulary.

`SoftCrossEntropy` is EAGLE-3's loss (arXiv 2503.01840): -sum_v p(v) log q(v), p renormalised over the draft vocabulary.
Its gradient is that of KL(p || q).

The LK losses train a draft for what speculative sampling accepts (arXiv 2602.23881). A token drawn from q is accepted
with probability

    a = sum_v min(p(v), q(v)) = 1 - TV(p, q)

over the draft vocabulary, p being the target's true probabilities: what the draft cannot propose is never accepted, so
it is not spread over the rest. p' is p renormalised over the draft vocabulary, for which alone KL is finite. (Where
training knows the target's head on the draft vocabulary alone, `training.out_of_vocabulary=text`, p is p' too.)

    alpha:   -log a
    lambda:  w KL(p' || q) + (1 - w) (1 - a),   w = exp(-decay a), taken as a constant

The paper takes one w per draft step, from the batch's mean acceptance. Here every position has its own: the loss stays
a sum over positions, whatever the packing, the number of ranks and the accumulation.

With m(v) = 1 where q(v) < p(v) and else 0, the slope of a by the draft's logits is q (m - sum_v m(v) q(v)).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from models.config.draft_base import LossChoice
from models.losses.chunked import Diverged, LossDivergence


def chosen_divergence(config: LossChoice) -> LossDivergence:
    """What a method's configuration names."""
    if config.loss == "lk_alpha":
        return LKAlpha()
    return SoftCrossEntropy() if config.loss == "kl" else LKLambda(config.lk_decay)


@dataclass(frozen=True)
class SoftCrossEntropy(LossDivergence):
    """`-sum_v p(v) log q(v)`."""

    def __call__(
        self, logits: Tensor, log_p: Tensor, log_mass: Tensor, weights: Tensor | None, labels: Tensor | None
    ) -> Diverged:
        p = log_p.exp()
        dots = _dots(logits, p)
        greatest = logits.amax(-1)
        q = logits.softmax(-1)
        # The log-normaliser, at the greatest logit: log q = z - log_norm. And sum p log q = sum p z - log_norm.
        values = greatest - q.amax(-1).log() - dots
        return Diverged(values, None if weights is None else q.sub_(p.unsqueeze(1)).mul_(weights.unsqueeze(-1)))


@dataclass(frozen=True)
class LKAlpha(LossDivergence):
    """`-log a`."""

    def __call__(
        self, logits: Tensor, log_p: Tensor, log_mass: Tensor, weights: Tensor | None, labels: Tensor | None
    ) -> Diverged:
        log_q = _log_softmax(logits)
        log_a, gain = _acceptance(log_q, (log_p + log_mass).unsqueeze(1), weights is not None)
        return Diverged(-log_a, None if weights is None or gain is None else gain.mul_(-weights.unsqueeze(-1)))


@dataclass(frozen=True)
class LKLambda(LossDivergence):
    """`w KL(p' || q) + (1 - w) (1 - a)` with `w = exp(-decay a)`."""

    decay: float

    def __call__(
        self, logits: Tensor, log_p: Tensor, log_mass: Tensor, weights: Tensor | None, labels: Tensor | None
    ) -> Diverged:
        p = log_p.exp()
        log_q = _log_softmax(logits)
        divergence = (p * log_p).sum(-1, keepdim=True) - _dots(log_q, p)
        log_a, gain = _acceptance(log_q, (log_p + log_mass).unsqueeze(1), weights is not None)
        a = log_a.exp()
        w = (-self.decay * a).exp()
        values = w * divergence + (1 - w) * (1 - a)
        if gain is None or weights is None:
            return Diverged(values, None)
        slope = log_q.exp_().sub_(p.unsqueeze(1)).mul_((weights * w).unsqueeze(-1))
        return Diverged(values, slope.sub_(gain.mul_((weights * (1 - w) * a).unsqueeze(-1))))


@dataclass(frozen=True)
class MixedLoss(LossDivergence):
    """A weighted sum of what block drafts are trained by (DSpark, arXiv 2607.05147); z are the draft's logits.

    cross_entropy     -log q(x), x the text's own token; 0 where the draft vocabulary lacks it
    kl                -sum_v p'(v) log q(v)
    total_variation   sum_v |q(v) - p(v)| over the target's whole vocabulary: 2 (1 - a)
    """

    cross_entropy: float
    kl: float
    total_variation: float

    @property
    def labelled(self) -> bool:
        return self.cross_entropy > 0

    def __call__(
        self, logits: Tensor, log_p: Tensor, log_mass: Tensor, weights: Tensor | None, labels: Tensor | None
    ) -> Diverged:
        log_q = _log_softmax(logits)
        q, p = log_q.exp(), (log_p + log_mass).exp_().unsqueeze(1).expand(log_q.shape)
        below = q < p
        acceptance = torch.minimum(p, q).sum(-1)
        values = self.total_variation * 2 * (1 - acceptance)
        known = own = None
        if self.cross_entropy:
            assert labels is not None
            known = (labels >= 0).to(q.dtype)[:, None].expand(acceptance.shape)
            own = labels.clamp(min=0)[:, None, None].expand(*acceptance.shape, 1)
            values = values - self.cross_entropy * known * log_q.gather(-1, own).squeeze(-1)
        if self.kl:
            values = values - self.kl * _dots(log_q, log_p.exp())
        if weights is None:
            return Diverged(values, None, acceptance)
        # q ((ce + kl) + 2 tv (sum_v m q - m)) - kl p' - ce e, m being 1 where q < p; in the memory of `log_q` and `q`.
        part = log_q.copy_(below).mul_(2 * self.total_variation)
        inside = (q * part).sum(-1, keepdim=True) + self.kl
        if known is not None:
            inside = inside + self.cross_entropy * known.unsqueeze(-1)
        slope = q.mul_(part.neg_().add_(inside))
        if self.kl:
            slope.sub_(self.kl * log_p.exp().unsqueeze(1))
        if known is not None and own is not None:
            share = self.cross_entropy * known.unsqueeze(-1)
            if torch.compiler.is_compiling():  # one kernel with the rest, for which the slope need not be written
                slope = slope - share * (torch.arange(slope.shape[-1], device=own.device) == own)
            else:
                slope.scatter_add_(-1, own, -share)
        return Diverged(values, slope.mul_(weights.unsqueeze(-1)), acceptance)


def _dots(logits: Tensor, p: Tensor) -> Tensor:
    """`[n, S]` sums over v of `logits` `[n, S, Vd]` times `p` `[n, Vd]`."""
    if logits.device.type == "cpu" and len(p) and not torch.compiler.is_compiling():
        # A batched product with one column is five times slower than a product per position.
        return torch.stack([of_one @ weights for of_one, weights in zip(logits, p, strict=True)])
    return (logits * p.unsqueeze(1)).sum(-1)


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.sub_(logits.logsumexp(-1, keepdim=True))


def _acceptance(log_q: Tensor, log_p: Tensor, with_slope: bool) -> tuple[Tensor, Tensor | None]:
    """`log a` `[n, S]`, and its slope `[n, S, Vd]`; in logarithms, because a starts near 0."""
    log_a = torch.minimum(log_q, log_p).logsumexp(-1)
    if not with_slope:
        return log_a, None
    # m q / a
    gain = (log_q - log_a.unsqueeze(-1)).exp_().masked_fill_(log_q >= log_p, 0)
    return log_a, gain.sub_(log_q.exp() * gain.sum(-1, keepdim=True))
