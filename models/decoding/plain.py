"""The target alone: greedy decoding at batch 1, continuations of many prompts at once, its most likely tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from infra.refusal import Refusal
from models.drafts.sampling import GREEDY, Sampling
from models.drafts.trees import Likeliest
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


def continue_batch(
    target: TargetModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    eos_ids: frozenset[int],
    sampling: Sampling = GREEDY,
    *,
    batch_size: int = 16,
    advance: Callable[[int], None] = lambda finished: None,
) -> list[list[int]]:
    """Continue every prompt; results in the order of `prompts`.

    Prompts are sorted by length and taken `batch_size` at a time. A batch starts together at its shortest prompt; a
    longer prompt goes on reading its own tokens until it ends and writes from then on. So there is no padding, every
    row has the positions and the attention of its own batch-1 decoding, and the ragged case is the even one.

    Args:
        target: the target.
        prompts: token ids, at least one each.
        max_new_tokens: most tokens of a continuation, the first one included.
        eos_ids: tokens that end a text; kept as its last token.
        sampling: how tokens are chosen; its generator is on the target's device.
        batch_size: prompts decoded together.
        advance: called with the number of prompts that just finished.
    """
    assert batch_size >= 1
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    results: list[list[int]] = [[] for _ in prompts]
    for first in range(0, len(order), batch_size):
        chosen = order[first : first + batch_size]
        batch = _Batch(target, [list(prompts[index]) for index in chosen])
        texts = batch.run(max_new_tokens, eos_ids, sampling)
        for index, text in zip(chosen, texts, strict=True):
            results[index] = text
        advance(len(chosen))
    return results


class _Batch:
    """Prompts that are decoded together; rows leave when their text ends."""

    def __init__(self, target: TargetModel, prompts: list[list[int]]):
        self.target = target
        self.prompts = prompts
        self.texts: list[list[int]] = [[] for _ in prompts]
        self.rows = list(range(len(prompts)))

    def run(self, max_new_tokens: int, eos_ids: frozenset[int], sampling: Sampling) -> list[list[int]]:
        cache = self.target.new_cache()
        read = len(self.prompts[0])
        tokens = torch.tensor([prompt[:read] for prompt in self.prompts], device=self.target.device)
        while self.rows:
            last = self.target.forward(tokens, cache).last[:, -1]
            writing = [slot for slot, row in enumerate(self.rows) if len(self.prompts[row]) <= read]
            if writing:
                chosen = sampling.choose(self.target.logits(last[writing])).tolist()
                for slot, token in zip(writing, chosen, strict=True):
                    self.texts[self.rows[slot]].append(token)
            going = [slot for slot, row in enumerate(self.rows) if not ended(self.texts[row], max_new_tokens, eos_ids)]
            if len(going) < len(self.rows):
                self.rows = [self.rows[slot] for slot in going]
                kept = torch.tensor(going, dtype=torch.long, device=self.target.device)
                cache.reorder_cache(kept)  # type: ignore[arg-type]
            tokens = torch.tensor([[self._at(row, read)] for row in self.rows], device=self.target.device)
            read += 1
        return self.texts

    def _at(self, row: int, position: int) -> int:
        prompt = self.prompts[row]
        return prompt[position] if position < len(prompt) else self.texts[row][position - len(prompt)]


def _row(target: TargetModel, tokens: Sequence[int]) -> Tensor:
    return torch.tensor([list(tokens)], device=target.device)


def likeliest(logits: Tensor, count: int) -> Likeliest:
    """The `count` greatest of each row of `[n, V]` logits; fewer where the vocabulary is smaller."""
    best = logits.topk(min(count, logits.shape[-1]), dim=-1)
    return Likeliest(best.indices, best.values - logits.logsumexp(-1, keepdim=True))


def likeliest_after(target: TargetModel, last: Tensor, count: int) -> Likeliest:
    """The most likely tokens, from `[n, H]` hidden states after the final norm."""
    return Likeliest.joined([likeliest(target.logits(rows), count) for rows in last.split(ROWS)])
