"""The target alone: greedy decoding at batch 1, its most likely tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from infra.refusal import Refusal
from models.drafts.sampling import GREEDY, Sampling
from models.targets.model import TargetModel

ROWS = 64
"""Positions whose logits are alive at once: 67 MB for 262,144 tokens."""


@dataclass(frozen=True)
class Prefill:
    """The target after a prompt of P tokens; for one decoding only, which writes to its cache."""

    prompt: tuple[int, ...]
    cache: DynamicCache
    aux: Tensor
    """`[P, K*H]` target features of the prompt."""
    token: int
    """The first token of the continuation."""
    last: Tensor
    """`[P, H]` the prompt's hidden states after the final norm."""


def ended(tokens: list[int], max_new_tokens: int, eos_ids: frozenset[int]) -> bool:
    """Whether a continuation is over: at its maximum length, or at the end of the text."""
    return len(tokens) >= max_new_tokens or (bool(tokens) and tokens[-1] in eos_ids)


def end_of(tokens: list[int], eos_ids: frozenset[int]) -> list[int]:
    """`tokens` up to and including the first end-of-text token."""
    for index, token in enumerate(tokens):
        if token in eos_ids:
            return tokens[: index + 1]
    return tokens


def prefill(target: TargetModel, prompt: Sequence[int], sampling: Sampling = GREEDY) -> Prefill:
    """Run the target over `prompt` (at least one token) and choose the next token."""
    if not prompt:
        raise Refusal("a prompt needs at least one token: check the tokenizer and add_bos")
    cache = target.new_cache()
    states = target.forward(_row(target, prompt), cache)
    token = int(sampling.choose(target.logits(states.last[0, -1:])))
    return Prefill(tuple(prompt), cache, states.features[0], token, states.last[0])


def decode(target: TargetModel, start: Prefill, max_new_tokens: int, eos_ids: frozenset[int]) -> list[int]:
    """Greedy continuation of at most `max_new_tokens` tokens, the prefill token first, end of text included."""
    tokens = [start.token]
    while not ended(tokens, max_new_tokens, eos_ids):
        states = target.forward(_row(target, tokens[-1:]), start.cache)
        tokens.append(int(target.logits(states.last[0]).argmax()))
    return tokens


def continue_greedily(
    target: TargetModel, prompt: Sequence[int], max_new_tokens: int, eos_ids: frozenset[int]
) -> list[int]:
    """Prefill and `decode`."""
    return decode(target, prefill(target, prompt), max_new_tokens, eos_ids)


def _row(target: TargetModel, tokens: Sequence[int]) -> Tensor:
    return torch.tensor([list(tokens)], device=target.device)


def likeliest_after(target: TargetModel, last: Tensor, count: int) -> Tensor:
    """`[n, count]` int64 the most likely tokens, best first, from `[n, H]` hidden states after the final norm."""
    return torch.cat([target.logits(rows).topk(count).indices for rows in last.split(ROWS)])
