"""Proposed tokens, and trees of them: their shape, and what one target pass needs to verify them."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from infra.refusal import Refusal

ROOT = -1
"""The last emitted token, from which a tree grows."""
NO_PROPOSAL = -1
"""Stands where a source has nothing to propose; neither it nor anything after it is verified or accepted."""
ABSENT = -1
"""Stands for a token that a tree does not hold."""


@dataclass(frozen=True)
class Proposals:
    """k proposed tokens and what they were drawn from."""

    tokens: Tensor
    """`[k]` int64, target-vocabulary ids."""
    probabilities: Tensor | None
    """`[k, V]` over the target's vocabulary, row i given the proposals before it: at most 7 MB for a lookahead of 7
    and 262,144 tokens in float32. None: proposed with certainty."""

    def usable(self) -> "Proposals":
        """Those before the first `NO_PROPOSAL`."""
        tokens = self.tokens.tolist()
        if NO_PROPOSAL not in tokens:
            return self
        count = tokens.index(NO_PROPOSAL)
        return Proposals(self.tokens[:count], None if self.probabilities is None else self.probabilities[:count])

    def over(self, vocabulary: int) -> Tensor:
        """`[k, V]` the distributions; one-hot for proposals with certainty. All tokens must be real ones."""
        if self.probabilities is None:
            certain = torch.zeros(len(self.tokens), vocabulary, device=self.tokens.device)
            return certain.scatter_(1, self.tokens.unsqueeze(-1), 1.0)
        assert self.probabilities.shape == (len(self.tokens), vocabulary)
        return self.probabilities


def certain(tokens: Sequence[int], device: torch.device) -> Proposals:
    """Tokens proposed with certainty."""
    return Proposals(torch.tensor(tokens, dtype=torch.long, device=device), None)


@dataclass(frozen=True)
class DynamicTree:
    """The shape of an EAGLE-2 tree (arXiv 2406.16858).

    In each of `depth` steps the `topk` likeliest nodes get `topk` children each; the `tokens` likeliest of all are
    kept, by the product of the draft's probabilities along their paths. With a top-k of 1 it is a chain.
    """

    depth: int
    topk: int
    tokens: int

    def __post_init__(self) -> None:
        if min(self.depth, self.topk, self.tokens) < 1:
            raise Refusal(f"a tree of depth {self.depth}, top-k {self.topk}, {self.tokens} tokens: 1 is the least")


def parse_shape(text: str) -> DynamicTree:
    """`dynamic-5-4-16`: depth, top-k, tokens. Raises Refusal for anything else."""
    numbers = re.fullmatch(r"dynamic-(\d+)-(\d+)-(\d+)", text)
    if numbers is None:
        raise Refusal(f"tree {text!r}: write dynamic-5-4-16 (depth, top-k, tokens)")
    depth, topk, tokens = map(int, numbers.groups())
    return DynamicTree(depth, topk, tokens)


@dataclass(frozen=True)
class Tree:
    """n proposals. A parent precedes its children; siblings are in the order in which they are tried."""

    proposals: Proposals
    """Row i of its probabilities is what token i was drawn from, given its ancestors and the siblings before it."""
    parents: tuple[int, ...]
    """Parent of each proposal; `ROOT` if it follows the last emitted token."""

    @classmethod
    def chain(cls, proposals: Proposals) -> "Tree":
        """A chain of the proposals before the first `NO_PROPOSAL`."""
        usable = proposals.usable()
        return cls(usable, tuple(range(ROOT, len(usable.tokens) - 1)))

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(ROOT, len(self.parents) - 1))


@lru_cache(maxsize=4096)
def depths(parents: tuple[int, ...], size: int) -> Tensor:
    """`[size]` int64 depth of the root (0) and of every proposal; what pads it has 0."""
    found = [0] * size
    for node, parent in enumerate(parents):
        found[node + 1] = found[parent + 1] + 1
    return torch.tensor(found)


@lru_cache(maxsize=4096)
def ancestors(parents: tuple[int, ...], size: int) -> Tensor:
    """`[size, size]` bool: which of root and proposals (row and column 0 is the root) lie on each one's path.

    Each lies on its own; what pads the tree sees itself only.
    """
    seen = torch.eye(size, dtype=torch.bool)
    for node, parent in enumerate(parents):
        seen[node + 1] |= seen[parent + 1]
    return seen
