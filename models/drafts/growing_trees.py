"""Dynamic trees (EAGLE-2, arXiv 2406.16858) of many texts that grow together, as tensors; see `DynamicTree`."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from models.drafts.trees import ABSENT, ROOT, Proposals, Tree

ROWS = 512
"""Rows whose logits are alive at once."""


class Beams(NamedTuple):
    """The places of a depth that get children."""

    parents: Tensor
    """`[n, topk]` int64, which beam of the depth before each one follows."""
    tokens: Tensor
    """`[n, topk]` int64, target ids."""


class GrowingTrees:
    """Trees of n texts. Places are numbered depth by depth, in the order of their parents and of their ranks.

    Args:
        texts: n.
        topk: places of each depth that get children, and how many each.
        device: where they grow.
    """

    def __init__(self, texts: int, topk: int, device: torch.device):
        self.topk = topk
        self.tokens, self.parents, self.scores = list[Tensor](), list[Tensor](), list[Tensor]()
        """Of each depth `[n, m]`: target ids, the numbers of parents, log-probabilities of whole paths (float64)."""
        self._beams = torch.full((texts, 1), ROOT, device=device)
        self._beam_scores = torch.zeros(texts, 1, dtype=torch.double, device=device)
        self._size = 0

    def add(self, normed: Tensor, logits: Callable[[Tensor], Tensor], target_ids: Tensor) -> None:
        """Add the likeliest children of each of w beams.

        Args:
            normed: `[n, w, h]` hidden states.
            logits: theirs over the draft vocabulary: `[rows, h]` to `[rows, Vd]`.
            target_ids: `[Vd]` int64.
        """
        parts = [logits(rows).float().log_softmax(-1).topk(self.topk) for rows in normed.flatten(0, 1).split(ROWS)]
        chances, places = (torch.cat(of).unflatten(0, normed.shape[:2]) for of in zip(*parts, strict=True))
        # Rounding must not make a child likelier than its parent: it could then be kept without it.
        scores = self._beam_scores.unsqueeze(-1) + chances.double().clamp(max=0)
        self.tokens.append(target_ids[places].flatten(1))
        self.scores.append(scores.flatten(1))
        self.parents.append(self._beams.repeat_interleave(self.topk, dim=1))

    def descend(self) -> Beams:
        """Choose which places of the last depth get children."""
        self._beam_scores, chosen = (x[:, : self.topk] for x in _best_first(self.scores[-1]))
        self._beams = self._size + chosen
        self._size += self.scores[-1].shape[1]
        return Beams(chosen // self.topk, self.tokens[-1].gather(1, chosen))

    def kept(self, count: int) -> list[Tree]:
        """Each text's tree of its `count` likeliest places."""
        _, order = _best_first(torch.cat(self.scores, dim=1))
        nodes = order[:, :count].sort(dim=1).values
        tokens = torch.cat(self.tokens, dim=1).gather(1, nodes)
        parents = torch.cat(self.parents, dim=1).gather(1, nodes)
        found = []
        for row, (own, above) in enumerate(zip(nodes.tolist(), parents.tolist(), strict=True)):
            place = {ROOT: ROOT} | {node: index for index, node in enumerate(own)}
            found.append(Tree(Proposals(tokens[row], None), tuple(place[node] for node in above)))
        return found

    def ranks_of(self, own: Tensor) -> Tensor:
        """Where given paths stand, one of each text: tokens `[n, D]`, D the trees' depth, `ABSENT` beyond its end.

        Returns:
            `[n, D, D]` int64; see `BranchingSource.ranks_along`.
        """
        every, node, start = torch.cat(self.scores, dim=1), own.new_full((len(own), 1), ROOT), 0
        number = torch.arange(every.shape[1], device=own.device)
        ends = torch.tensor([scores.shape[1] for scores in self.scores]).cumsum(0).tolist()
        ranks = own.new_full((len(own), len(ends), len(ends)), ABSENT)
        for depth, (tokens, parents) in enumerate(zip(self.tokens, self.parents, strict=True)):
            fits = (parents == node) & (tokens == own[:, depth, None])
            found = fits.any(1)
            # A number that no place has: nothing follows what is not there.
            node = torch.where(found, start + fits.long().argmax(1), len(number)).unsqueeze(1)
            score = every.gather(1, node.clamp(max=len(number) - 1))
            before = (every > score) | ((every == score) & (number < node))
            for deepest in range(depth, len(ends)):
                ranks[:, deepest, depth] = torch.where(found, before[:, : ends[deepest]].sum(1), ABSENT)
            start = ends[depth]
        return ranks


def _best_first(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Each row `[n, m]`, the greatest first and of equals the first, and where they stood."""
    return scores.sort(dim=1, descending=True, stable=True)
