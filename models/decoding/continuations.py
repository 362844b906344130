"""The target alone continues many prompts at once."""

from collections.abc import Callable, Sequence
from copy import copy
from itertools import groupby
from typing import Any

import torch
from transformers import DynamicCache

from models.decoding.batch import TargetBatch
from models.decoding.plain import Prefill, ended
from models.drafts.sampling import GREEDY, Sampling
from models.drafts.trees import Proposals, Tree
from models.targets.model import TargetModel


@torch.no_grad()
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

    Prompts are sorted by length and taken `batch_size` at a time. Those of one length are read together, and nothing is
    padded; then every row goes on at its own length. Each sees what it would see alone.

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
        together = [list(prompts[index]) for index in chosen]
        batch = _Ragged(target, together, sampling) if target.rewinds else _Aligned(target, together, sampling)
        for index, text in zip(chosen, batch.run(max_new_tokens, eos_ids), strict=True):
            results[index] = text
        advance(len(chosen))
    return results


class _Ragged:
    """Prompts of a target whose caches can be taken apart by row; rows leave when their text ends."""

    def __init__(self, target: TargetModel, prompts: list[list[int]], sampling: Sampling):
        self.target, self.prompts, self.sampling = target, prompts, sampling

    def run(self, max_new_tokens: int, eos_ids: frozenset[int]) -> list[list[int]]:
        starts = [start for _, some in groupby(self.prompts, key=len) for start in self._read(list(some))]
        texts = [[start.token] for start in starts]
        rows = [row for row, text in enumerate(texts) if not ended(text, max_new_tokens, eos_ids)]
        if not rows:
            return texts
        batch = TargetBatch(self.target, [starts[row] for row in rows])
        starts.clear()  # the batch has copies
        nothing = Tree(Proposals(torch.empty(0, dtype=torch.long, device=self.target.device), None), ())
        while rows:
            trees = [nothing] * len(rows)
            step = batch.verify(*batch.place([texts[row][-1] for row in rows], trees), trees)
            batch.keep([(0,)] * len(rows))
            for row, token in zip(rows, self.sampling.choose(step.logits).tolist(), strict=True):
                texts[row].append(token)
            going = [at for at, row in enumerate(rows) if not ended(texts[row], max_new_tokens, eos_ids)]
            if 0 < len(going) < len(rows):
                batch.only(going)
            rows = [rows[at] for at in going]
        return texts

    def _read(self, prompts: list[list[int]]) -> list[Prefill]:
        """Read prompts of one length; their features, which nobody wants here, are let go."""
        cache = self.target.new_cache()
        states = self.target.forward(torch.tensor(prompts, device=self.target.device), cache)
        tokens = self.sampling.choose(self.target.logits(states.last[:, -1])).tolist()
        nothing = states.last.new_empty(0, 0)
        return [
            Prefill(tuple(prompt), rows_of(cache, slice(row, row + 1)), nothing, token, nothing)
            for row, (prompt, token) in enumerate(zip(prompts, tokens, strict=True))
        ]


def rows_of(cache: DynamicCache, rows: slice) -> DynamicCache:
    """Some texts' part of a cache; its tensors are those of the cache.

    A forward leaves the cache's keys and values as they are, and overwrites the states of linear attention.
    """
    found = DynamicCache()
    for layer in cache.layers:
        own: Any = copy(layer)
        if hasattr(own, "batch_select_indices"):
            own.batch_select_indices(rows)
        for kind in ("conv_states", "recurrent_states"):
            if states := getattr(own, kind, None):
                setattr(own, kind, {at: None if state is None else state[rows] for at, state in states.items()})
        found.layers.append(own)
    return found


class _Aligned:
    """Prompts of a target whose caches hold a state: they start together at the shortest prompt.

    A longer prompt goes on reading its own tokens until it ends and writes from then on, so nothing is padded.
    """

    def __init__(self, target: TargetModel, prompts: list[list[int]], sampling: Sampling):
        self.target, self.sampling = target, sampling
        self.prompts = prompts
        self.texts: list[list[int]] = [[] for _ in prompts]
        self.rows = list(range(len(prompts)))

    def run(self, max_new_tokens: int, eos_ids: frozenset[int]) -> list[list[int]]:
        cache = self.target.new_cache()
        read = len(self.prompts[0])
        tokens = torch.tensor([prompt[:read] for prompt in self.prompts], device=self.target.device)
        while self.rows:
            last = self.target.forward(tokens, cache).last[:, -1]
            writing = [slot for slot, row in enumerate(self.rows) if len(self.prompts[row]) <= read]
            if writing:
                chosen = self.sampling.choose(self.target.logits(last[writing])).tolist()
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
