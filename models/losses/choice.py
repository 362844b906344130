"""The loss that a method's configuration names."""

from models.config.draft_base import LossChoice
from models.losses.chunked import LossDivergence
from models.losses.lk import LKAlpha, LKLambda
from models.losses.soft_cross_entropy import SoftCrossEntropy


def chosen_divergence(config: LossChoice) -> LossDivergence:
    """What is summed over supervised positions."""
    if config.loss == "lk_alpha":
        return LKAlpha()
    return SoftCrossEntropy() if config.loss == "kl" else LKLambda(config.lk_decay)
