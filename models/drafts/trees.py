"""Proposed tokens, and trees of them: their shapes, how they grow, and what one target pass needs to verify them.

A static tree has the same places in every step; each is a path of ranks from the root. A dynamic one (EAGLE-2, arXiv
2406.16858) grows level by level from the likeliest places and keeps the likeliest of all it has seen, by the product
of the draft's probabilities along the path. A chain is the tree in which every place has one child.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from infra.refusal import Refusal
from models.drafts.sampling import Sampling

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
class Likeliest:
    """The target's k likeliest next tokens after n positions, best first."""

    tokens: Tensor
    """`[n, k]` int64."""
    log_probabilities: Tensor
    """`[n, k]` float32, over the whole vocabulary."""

    def __getitem__(self, rows: slice) -> "Likeliest":
        return Likeliest(self.tokens[rows], self.log_probabilities[rows])

    @classmethod
    def joined(cls, parts: Sequence["Likeliest"]) -> "Likeliest":
        """All parts' positions, in order."""
        return cls(torch.cat([part.tokens for part in parts]), torch.cat([part.log_probabilities for part in parts]))


@dataclass(frozen=True)
class StaticTree:
    """Places of a tree: `(0, 2)` is the third child of the root's first child.

    Raises Refusal where a place has no parent, or a rank is left out.
    """

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        known = {(), *self.paths}
        for path in self.paths:
            before = (*path[:-1], path[-1] - 1) if path and path[-1] > 0 else path[:-1]
            if not path or before not in known or len(known) != len(self.paths) + 1:
                raise Refusal(
                    f"tree place {list(path)}: every place must stand once, with its parent and the ranks before its "
                    "own, for instance [0], [1], [0, 0]"
                )

    @classmethod
    def branching(cls, factors: Sequence[int]) -> "StaticTree":
        """Every place at depth d (the root's is 0) has `factors[d]` children."""
        levels = [product(*(range(factor) for factor in factors[: depth + 1])) for depth in range(len(factors))]
        return cls(tuple(path for level in levels for path in level))

    @property
    def depth(self) -> int:
        return max(map(len, self.paths), default=0)

    def parents_at(self, depth: int) -> dict[tuple[int, ...], int]:
        """Paths of length `depth` that have children, and how many."""
        children: dict[tuple[int, ...], int] = {}
        for path in sorted(self.paths):
            if len(path) == depth + 1:
                children[path[:-1]] = children.get(path[:-1], 0) + 1
        return children


@dataclass(frozen=True)
class DynamicTree:
    """In each of `depth` steps the `topk` likeliest nodes get `topk` children each; the `tokens` likeliest are kept."""

    depth: int
    topk: int
    tokens: int

    def __post_init__(self) -> None:
        if min(self.depth, self.topk, self.tokens) < 1:
            raise Refusal(f"a tree of depth {self.depth}, top-k {self.topk}, {self.tokens} tokens: 1 is the least")


TreeShape = StaticTree | DynamicTree


def parse_shape(text: str) -> TreeShape:
    """`3x2x1` (children of every place, by depth) or `dynamic-5-4-16` (depth, top-k, tokens)."""
    kind, *numbers = text.split("-")
    try:
        if kind == "dynamic":
            depth, topk, tokens = map(int, numbers)
            return DynamicTree(depth, topk, tokens)
        if not numbers:
            factors = [int(part) for part in kind.split("x")]
            if min(factors) >= 1:
                return StaticTree.branching(factors)
    except ValueError:
        pass
    raise Refusal(f"tree {text!r}: write 3x2x1 (children by depth) or dynamic-5-4-16 (depth, top-k, tokens)")


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


@dataclass(frozen=True)
class Candidates:
    """What may follow each of m places, w candidates each, best first or in the order drawn."""

    tokens: Tensor
    """`[m, w]` int64, target-vocabulary ids; `NO_PROPOSAL` from where a place has no more."""
    scores: Tensor
    """`[m, w]` log-probabilities given the path; of no meaning where the tree is static."""
    drawn_from: Tensor | None = None
    """`[m, w, V]` the distribution of each draw, given the draws before it; None: proposed with certainty."""


@dataclass
class Growing:
    """A tree while it grows: a parent always stands before its children."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    """Log-probability of the whole path."""
    drawn_from: list[Tensor] = field(default_factory=list)

    def depth(self, node: int) -> int:
        """Tokens on the path to a node, its own included; 0 for the root."""
        return 0 if node == ROOT else 1 + self.depth(self.parents[node])

    def add(self, parent: int, candidates: Candidates, row: int, rank: int) -> int | None:
        """Add a child; None if there is no such candidate."""
        token = int(candidates.tokens[row, rank])
        if token == NO_PROPOSAL:
            return None
        before = self.scores[parent] if parent != ROOT else 0.0
        self.tokens.append(token)
        self.parents.append(parent)
        # Rounding must not make a child likelier than its parent: it could then be kept without it.
        self.scores.append(before + min(0.0, float(candidates.scores[row, rank])))
        if candidates.drawn_from is not None:
            self.drawn_from.append(candidates.drawn_from[row, rank])
        return len(self.tokens) - 1

    def only(self, kept: Sequence[int], device: torch.device) -> Tree:
        """Nodes (ascending) whose parents are kept too."""
        place = {ROOT: ROOT} | {node: index for index, node in enumerate(kept)}
        probabilities = torch.stack([self.drawn_from[node] for node in kept]) if self.drawn_from else None
        tokens = torch.tensor([self.tokens[node] for node in kept], dtype=torch.long, device=device)
        return Tree(Proposals(tokens, probabilities), tuple(place[self.parents[node]] for node in kept))


Expand = Callable[[Growing, Sequence[int], int], Candidates]
"""(the tree so far, nodes of one depth or the root, width w) -> at most w candidates after each of these nodes."""


def grow(shape: TreeShape, expand: Expand, device: torch.device) -> Tree:
    """Grow a tree of this shape; places without a candidate, and all that would follow them, are left out."""
    if isinstance(shape, DynamicTree):
        return _grow_dynamic(shape, expand, device)
    grown = Growing()
    at: dict[tuple[int, ...], int] = {(): ROOT}
    for depth in range(shape.depth):
        children = {path: count for path, count in shape.parents_at(depth).items() if path in at}
        if not children:
            break
        candidates = expand(grown, [at[path] for path in children], max(children.values()))
        for row, (path, count) in enumerate(children.items()):
            for rank in range(min(count, candidates.tokens.shape[1])):
                node = grown.add(at[path], candidates, row, rank)
                if node is None:
                    break
                at[*path, rank] = node
    return grown.only(range(len(grown.tokens)), device)


def _grow_dynamic(shape: DynamicTree, expand: Expand, device: torch.device) -> Tree:
    grown, level = Growing(), [ROOT]

    def by_score(node: int) -> tuple[float, int]:
        return -grown.scores[node], node

    for _ in range(shape.depth):
        candidates = expand(grown, level, shape.topk)
        assert candidates.drawn_from is None, "which drawn tokens are kept must not depend on what was drawn"
        new = [
            grown.add(parent, candidates, row, rank)
            for row, parent in enumerate(level)
            for rank in range(candidates.tokens.shape[1])
        ]
        level = sorted((node for node in new if node is not None), key=by_score)[: shape.topk]
        if not level:
            break
    kept = sorted(range(len(grown.tokens)), key=by_score)[: shape.tokens]
    return grown.only(sorted(kept), device)


def likeliest_children(logits: Tensor, target_ids: Tensor, width: int) -> Candidates:
    """The `width` likeliest tokens of each row, with certainty.

    Args:
        logits: `[m, Vd]` over the draft vocabulary.
        target_ids: `[Vd]` int64, the target's ids of the draft vocabulary.
        width: candidates of each row.
    """
    best = logits.float().log_softmax(-1).topk(min(width, logits.shape[-1]), dim=-1)
    return Candidates(target_ids[best.indices].cpu(), best.values.cpu())


def drawn_children(logits: Tensor, target_ids: Tensor, width: int, vocabulary: int, sampling: Sampling) -> Candidates:
    """Draw `width` different tokens for each row, one after the other: each from what the ones before it left.

    Where fewer tokens have a probability, there are fewer. Arguments as of `likeliest_children`; `vocabulary` is V.
    """
    left = sampling.drafted(logits)
    tokens, drawn_from = [], []
    for _ in range(min(width, logits.shape[-1])):
        mass = left.sum(-1, keepdim=True)
        left = torch.where(mass > 0, left / mass, left)
        drawn = sampling.draw(torch.where(mass > 0, left, 1.0))
        tokens.append(torch.where(mass.squeeze(-1) > 0, target_ids[drawn], NO_PROPOSAL))
        over = left.new_zeros(len(left), vocabulary)
        over[:, target_ids] = left
        drawn_from.append(over)
        left = left.scatter(-1, drawn.unsqueeze(-1), 0.0)
    found = torch.stack(tokens, dim=1).cpu()
    return Candidates(found, torch.zeros(found.shape), torch.stack(drawn_from, dim=1))


def children(
    logits: Tensor, target_ids: Tensor, width: int, vocabulary: int, shape: TreeShape, sampling: Sampling
) -> Candidates:
    """Drawn children for a static tree while sampling, the likeliest ones otherwise.

    A dynamic tree keeps what is likely, so its tokens cannot be draws; proposed with certainty they are as exact.
    """
    if sampling.greedy or isinstance(shape, DynamicTree):
        return likeliest_children(logits, target_ids, width)
    return drawn_children(logits, target_ids, width, vocabulary, sampling)
