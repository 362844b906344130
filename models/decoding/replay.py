"""Verification for targets whose caches cannot be rewound: linear attention, state spaces, convolutions.

Their state after a token holds all tokens before it, so a rejected proposal cannot be removed. Every text keeps the
cache of what it has accepted; a step runs on a copy of it, each path from the root to a leaf on its own. If a text
accepts a whole path, the copy becomes its cache. Otherwise the target reads the accepted tokens again.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache

from models.decoding.batch import Verification
from models.decoding.plain import Prefill
from models.drafts.trees import ROOT, Tree
from models.targets.model import Placement, TargetModel

Path = tuple[int, ...]
"""Tokens of a step from the root: 0 is the last emitted token, n + 1 proposal n."""


class ReplayBatch:
    """Several texts, verified one after the other; the same calls as `TargetBatch`."""

    def __init__(self, target: TargetModel, starts: Sequence[Prefill]):
        self.target = target
        self.caches = [start.cache for start in starts]
        self._tokens = torch.empty(len(starts), 0, dtype=torch.long)
        self._copies: list[dict[Path, DynamicCache]] = []

    def place(self, last: Sequence[int], trees: Sequence[Tree]) -> tuple[Tensor, Placement | None]:
        """`[B, n + 1]` tokens of the next step, the last emitted one of each row first, padded; no placement."""
        first = torch.tensor(last, device=self.target.device).unsqueeze(1)
        proposed = pad_sequence([tree.proposals.tokens for tree in trees], batch_first=True)
        self._tokens = torch.cat([first, proposed], dim=1)
        return self._tokens, None

    def verify(self, tokens: Tensor, placement: Placement | None, trees: Sequence[Tree]) -> Verification:
        """One target forward for every path of every text."""
        assert placement is None
        self._copies = [{} for _ in trees]
        states = [self._states(row, tree) for row, tree in enumerate(trees)]
        last = torch.cat([last for _, last in states])
        return Verification(trees, tokens.tolist(), [aux for aux, _ in states], self.target.logits(last))

    def _states(self, row: int, tree: Tree) -> tuple[Tensor, Tensor]:
        """Features `[n + 1, K*H]` and outputs after the final norm `[n + 1, H]` of one text's step."""
        rows: dict[int, tuple[Tensor, Tensor]] = {}
        for path in paths_of(tree):
            cache = copy.deepcopy(self.caches[row])
            states = self.target.forward(self._tokens[row, list(path)].unsqueeze(0), cache)
            rows |= dict(zip(path, zip(states.features[0], states.last[0], strict=True), strict=True))
            self._copies[row][path] = cache
        aux, last = zip(*(rows[node] for node in range(len(rows))), strict=True)
        return torch.stack(aux), torch.stack(last)

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep these tokens of each row's last step, ascending: 0 is the last emitted token, then proposals."""
        for row, path in enumerate(map(tuple, paths)):
            whole = self._copies[row].get(path)
            if whole is None:
                self.target.forward(self._tokens[row, list(path)].unsqueeze(0), self.caches[row])
            else:
                self.caches[row] = whole
        self._copies = []

    def only(self, rows: Sequence[int]) -> None:
        """Let the other rows go."""
        self.caches = [self.caches[row] for row in rows]


def paths_of(tree: Tree) -> list[Path]:
    """Every path of a step from the last emitted token to a leaf."""
    parents = tree.parents
    leaves = [node for node in range(len(parents)) if node not in parents] or [ROOT]
    return [_path(parents, leaf) for leaf in leaves]


def _path(parents: Sequence[int], node: int) -> Path:
    return (0,) if node == ROOT else (*_path(parents, parents[node]), node + 1)
