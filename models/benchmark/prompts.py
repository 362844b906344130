"""Prompts of the benchmark: the beginnings of held-out samples. Runs in the benchmark."""

from collections.abc import Iterable

from torch import Tensor

from models.run import Run

LEAST_TOKENS = 2


def heldout_prompts(run: Run) -> list[list[int]]:
    """The prompts of a run's benchmarks. Raises ValueError where there are too few."""
    config, samples = run.config.benchmark, run.open_samples("heldout")
    heldout = (samples[index] for index in range(len(samples)))
    return take_prompts(((sample.tokens, sample.loss_mask) for sample in heldout), config.prompts, config.prompt_tokens)


def take_prompts(samples: Iterable[tuple[Tensor, Tensor]], count: int, prompt_tokens: int) -> list[list[int]]:
    """The first `count` different prompts.

    A conversation's prompt is all that precedes its first supervised token, and it is left out where that is longer
    than `prompt_tokens` (a cut turn would not be a prompt of that template). Plain text, supervised from its start,
    gives its first `prompt_tokens` tokens, at most half of it.

    Args:
        samples: tokens `[T]` int64 and loss mask `[T]` bool of each.
        count: prompts wanted; fewer come where there are fewer.
        prompt_tokens: most tokens of a prompt.

    Raises:
        ValueError: fewer than two prompts.
    """
    found: dict[tuple[int, ...], None] = {}
    seen = 0
    for tokens, loss_mask in samples:
        seen += 1
        prompt = _prompt(tokens, loss_mask, prompt_tokens)
        if prompt is not None:
            found[tuple(prompt)] = None
        if len(found) == count:
            break
    if len(found) < 2:
        raise ValueError(
            f"{len(found)} of {seen} samples give a prompt of {LEAST_TOKENS} to {prompt_tokens} tokens: raise "
            "benchmark.prompt_tokens, or give more text"
        )
    return [list(prompt) for prompt in found]


def _prompt(tokens: Tensor, loss_mask: Tensor, prompt_tokens: int) -> list[int] | None:
    first = int(loss_mask.int().argmax())
    # Position 0 is never generated, so plain text with a beginning-of-text token starts to be supervised at 1.
    length = min(prompt_tokens, len(tokens) // 2) if first <= 1 else first
    return tokens[:length].tolist() if LEAST_TOKENS <= length <= prompt_tokens else None
