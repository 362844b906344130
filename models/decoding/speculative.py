"""The reference speculative decoder: chains and trees, one text or several at once, greedy or sampled.

The specification for engines; runs in benchmarks. Greedy text is token for token the target's own; sampled text follows
the target's distribution after temperature and top-p (see `models.decoding.rejection`), in which the draft proposes by
sampling from its own distribution after the same temperature and top-p.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from models.decoding.batch import TargetBatch, Verification
from models.decoding.counts import Counts, end_of, ended
from models.decoding.observing import likeliest, likeliest_after
from models.decoding.plain import Prefill, prefill
from models.decoding.policy import LookaheadPolicy
from models.decoding.rejection import accept
from models.decoding.sampling import GREEDY, Sampling
from models.decoding.stopwatch import StepSeconds, Stopwatch, part_of
from models.drafts.base import NO_PROPOSAL, ObservingProposer, Proposals, Source
from models.drafts.trees import ROOT, Tree, TreeShape, branching
from models.targets.model import TargetModel

Lookahead = int | TreeShape | LookaheadPolicy
"""Proposals per step: so many in a chain, a tree, or as many as a policy chooses."""


@dataclass(frozen=True)
class Decoded:
    """A continuation and how it came about."""

    tokens: tuple[int, ...]
    """The prefill token first; end of text included."""
    counts: Counts
    """In a tree, accepted tokens are those of the longest accepted path, and the lookahead is its depth."""
    forwards: int
    """Target forwards after the prefill, the one of a cut step included."""
    lookaheads: tuple[int, ...]
    """Chosen for each of these forwards."""


@dataclass(frozen=True)
class Decision:
    """What a step emits: accepted proposals (their indexes, a path from the root) and the token that closes it."""

    path: tuple[int, ...]
    closing: int


def speculate(
    target: TargetModel,
    source: Source,
    prompt: Sequence[int],
    lookahead: Lookahead,
    max_new_tokens: int,
    eos_ids: frozenset[int],
    *,
    sampling: Sampling = GREEDY,
) -> Decoded:
    """Continue `prompt` by at most `max_new_tokens` tokens, exactly as the target alone would."""
    start = prefill(target, prompt, sampling)
    return decode_speculatively(target, source, start, lookahead, max_new_tokens, eos_ids, sampling=sampling)


def speculate_together(
    target: TargetModel,
    source: Source,
    prompts: Sequence[Sequence[int]],
    lookahead: Lookahead,
    max_new_tokens: int,
    eos_ids: frozenset[int],
    *,
    sampling: Sampling = GREEDY,
    watch: Stopwatch | None = None,
) -> list[Decoded]:
    """Continue all prompts at once, one target forward per verification step of all; each prefill runs by itself."""
    conversations = [
        Conversation(
            target, source, prefill(target, prompt, sampling), lookahead, max_new_tokens, eos_ids, sampling=sampling
        )
        for prompt in prompts
    ]
    decode_together(conversations, sampling, watch=watch)
    return [conversation.decoded() for conversation in conversations]


def decode_speculatively(
    target: TargetModel,
    source: Source,
    start: Prefill,
    lookahead: Lookahead,
    max_new_tokens: int,
    eos_ids: frozenset[int],
    *,
    sampling: Sampling = GREEDY,
) -> Decoded:
    """One target forward per verification step; `start`'s token was chosen by the same `sampling`."""
    conversation = Conversation(target, source, start, lookahead, max_new_tokens, eos_ids, sampling=sampling)
    decode_together([conversation], sampling)
    return conversation.decoded()


@torch.no_grad()
def decode_together(
    conversations: Sequence["Conversation"], sampling: Sampling, *, watch: Stopwatch | None = None
) -> None:
    """Decode to the end: one target forward verifies a step of every conversation that is not over.

    All have the same target, and a policy that chooses for one chooses for all.
    """
    going = [conversation for conversation in conversations if not conversation.over]
    if not going:
        return
    batch = TargetBatch(going[0].target, [conversation.start for conversation in going])
    while going:
        written = sum(len(conversation.tokens) for conversation in going)
        if watch is not None:
            watch.steps.append(StepSeconds(len(going)))
        with part_of(watch, "draft"):
            chosen = _choose(going)
            trees = [conversation.propose(lookahead) for conversation, lookahead in zip(going, chosen, strict=True)]
        with part_of(watch, "realign"):
            tokens, placement = batch.place([conversation.tokens[-1] for conversation in going], trees)
        with part_of(watch, "target"):
            steps = batch.verify(tokens, placement, trees)
        with part_of(watch, "decide"):
            decisions = [_agree(step) for step in steps] if sampling.greedy else _sample(steps, sampling)
        with part_of(watch, "realign"):
            batch.keep([(0, *(node + 1 for node in decision.path)) for decision in decisions])
        for conversation, step, decision in zip(going, steps, decisions, strict=True):
            conversation.take(step, decision)
        if watch is not None:
            watch.steps[-1].tokens = tokens.shape[1]
            watch.steps[-1].emitted = sum(len(conversation.tokens) for conversation in going) - written
        with part_of(watch, "realign"):
            rows = [row for row, conversation in enumerate(going) if not conversation.over]
            if 0 < len(rows) < len(going):
                batch.only(rows)
            going = [going[row] for row in rows]


def _choose(going: Sequence["Conversation"]) -> Sequence[int | TreeShape]:
    policy = going[0].policy
    assert all(conversation.policy is policy for conversation in going)
    if policy is None:
        return [conversation.shape for conversation in going]
    return policy.choose([conversation.accepting for conversation in going])


class Conversation:
    """One text while it is decoded: `propose` and `take` take turns until it is `over`.

    Raises ValueError for a negative lookahead, or a tree of a source that proposes chains only.
    """

    def __init__(
        self,
        target: TargetModel,
        source: Source,
        start: Prefill,
        lookahead: Lookahead,
        max_new_tokens: int,
        eos_ids: frozenset[int],
        *,
        sampling: Sampling,
    ):
        if isinstance(lookahead, int) and lookahead < 0:
            raise ValueError(f"lookahead {lookahead}: 0 proposes nothing, 4 four tokens per step")
        self.target, self.proposer, self.start, self.sampling = target, source.proposer(), start, sampling
        self.policy = lookahead if isinstance(lookahead, LookaheadPolicy) else None
        self.shape: int | TreeShape = lookahead.max_lookahead if isinstance(lookahead, LookaheadPolicy) else lookahead
        self.accepting = self.policy.request() if self.policy else None
        self.max_new_tokens, self.eos_ids = max_new_tokens, eos_ids
        self.tokens, self.accepted, self.lookaheads, self.cut = [start.token], [], [], 0
        self._unread = [start.aux]
        self._observer = self.proposer if isinstance(self.proposer, ObservingProposer) else None
        if self._observer is not None:
            seen = likeliest_after(target, start.last, self._observer.candidates)
            self._observer.observe(torch.tensor(start.prompt, device=target.device), seen)

    @property
    def over(self) -> bool:
        return ended(self.tokens, self.max_new_tokens, self.eos_ids)

    def propose(self, lookahead: int | TreeShape) -> Tree:
        """What the next step verifies."""
        self.lookaheads.append(lookahead if isinstance(lookahead, int) else lookahead.depth)
        device, sampling = self.target.device, self.sampling
        if lookahead == 0:
            return Tree(Proposals(torch.empty(0, dtype=torch.long, device=device), None), ())
        sequence = torch.tensor([*self.start.prompt, *self.tokens], device=device)
        # Steps without proposals leave their features for the next step that has some.
        aux, self._unread = self._unread[0] if len(self._unread) == 1 else torch.cat(self._unread), []
        if not isinstance(lookahead, int):
            return branching(self.proposer).propose_tree(sequence, aux, lookahead, sampling)
        if sampling.greedy:
            proposals = Proposals(self.proposer.propose(sequence, aux, lookahead), None)
        else:
            proposals = self.proposer.sample(sequence, aux, lookahead, sampling)
        assert len(proposals.tokens) <= lookahead
        return Tree.chain(proposals)

    def take(self, step: Verification, decision: Decision) -> None:
        """Go on with what the verification step emitted."""
        path, proposed = decision.path, step.tree.proposals.tokens.tolist()
        found = [proposed[node] for node in path]
        in_turn = not path or path[-1] + 1 == len(path)
        kept = slice(len(path) + 1) if in_turn else [0, *(node + 1 for node in path)]
        self._unread.append(step.aux[kept])
        if self._observer is not None:
            read = torch.tensor([self.tokens[-1], *found], device=self.target.device)
            self._observer.observe(read, likeliest(step.logits[kept], self._observer.candidates))
        if self.accepting is not None:
            self.accepting.learn(self.lookaheads[-1], len(path))
        emitted = [*found, decision.closing]
        written = end_of(emitted[: self.max_new_tokens - len(self.tokens)], self.eos_ids)
        self.tokens += written
        if len(written) == len(emitted):
            self.accepted.append(len(path))
        else:
            self.cut += 1

    def decoded(self) -> Decoded:
        deepest = self.shape if isinstance(self.shape, int) else self.shape.depth
        counts = Counts(deepest, tuple(self.accepted), self.cut)
        return Decoded(tuple(self.tokens), counts, counts.steps + counts.cut, tuple(self.lookaheads))


def _agree(step: Verification) -> Decision:
    """A greedy step: proposals that are the target's own choices, one below the other, and its choice after them."""
    choices = step.logits.argmax(-1).tolist()
    path, here = [], ROOT
    # A parent stands before its children, so one pass finds the path.
    for node, (token, parent) in enumerate(zip(step.tree.proposals.tokens.tolist(), step.tree.parents, strict=True)):
        if parent == here and token == choices[here + 1]:
            path.append(node)
            here = node
    return Decision(tuple(path), choices[here + 1])


def _sample(steps: Sequence[Verification], sampling: Sampling) -> list[Decision]:
    """Sampled steps, each row decided by itself; smaller trees are padded with nothing."""
    logits = pad_sequence([step.logits for step in steps], batch_first=True)
    vocabulary, size = logits.shape[-1], logits.shape[1] - 1
    proposals = [step.tree.proposals for step in steps]
    tokens = pad_sequence([each.tokens for each in proposals], batch_first=True, padding_value=NO_PROPOSAL)
    q = pad_sequence([each.over(vocabulary) for each in proposals], batch_first=True)
    parents = [[*step.tree.parents, *[ROOT] * (size - len(step.tree.parents))] for step in steps]
    places = torch.tensor(parents, dtype=torch.long, device=tokens.device).view(len(steps), size)
    accepted, closing = accept(sampling.distribution(logits), tokens, places, q, sampling)
    paths = [[] for _ in steps]
    for row, node in accepted.nonzero().tolist():
        paths[row].append(node)
    return [Decision(tuple(path), token) for path, token in zip(paths, closing.tolist(), strict=True)]
