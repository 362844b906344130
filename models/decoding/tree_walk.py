"""Walks of dynamic trees over a target's own text: counts of every depth and number of tokens, from one growth.

A tree's tokens are proposed with certainty, so a step accepts as many of them as continue the text, greedy or sampled
(`models.decoding.simulated`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from models.decoding.acceptance import AcceptedCounts
from models.decoding.simulated import TextReading, walk_chain
from models.drafts.batched_proposer import BranchingSource, PackedTexts
from models.drafts.trees import ABSENT


def ranks_of_texts(
    source: BranchingSource, readings: Sequence[TextReading], continuations: Sequence[int], topk: int, depth: int
) -> list[Tensor]:
    """Of each text `[R, D, D]`, on the host: see `BranchingSource.ranks_along`; a row for each token but the last.

    `continuations`: how many tokens of each text are the target's own, at least one each.
    """
    packed = PackedTexts.of([reading.following for reading in readings], [reading.aux for reading in readings])
    counts, start, wanted = [count - 1 for count in continuations], 0, list[Tensor]()
    for length, count in zip(packed.lengths, counts, strict=True):
        start += length
        wanted.append(torch.arange(start - 1 - count, start - 1))
    found = source.ranks_along(packed, torch.cat(wanted).to(packed.aux.device), topk, depth)
    return list(found.cpu().split(counts))


def walk_tree(ranks: Tensor, depth: int, tokens: int, *, ended: bool) -> AcceptedCounts:
    """Counts of a text's steps with trees of this depth and number of tokens.

    `ranks` are from `ranks_of_texts`. `ended`: the last token ends the text.
    """
    of_depth = ranks[:, depth - 1, :depth]
    held = (of_depth != ABSENT) & (of_depth < tokens)
    return walk_chain(held.long().cumprod(dim=1).sum(dim=1).tolist(), depth, ended=ended)
