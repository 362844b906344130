"""The reference speculative decoder: chains and trees, one text or several at once, greedy or sampled.

The specification for engines; runs in benchmarks. Greedy text is token for token the target's own; sampled text follows
the target's distribution after temperature, top-k and top-p (see `models.decoding.rejection`). The draft proposes by
sampling from its own distribution after the same temperature.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from infra.refusal import Refusal
from models.decoding.acceptance import AcceptedCounts
from models.decoding.batch import TargetBatch, Verification
from models.decoding.plain import Prefill, end_of, ended, likeliest_after, prefill
from models.decoding.rejection import accept
from models.decoding.replay import ReplayBatch
from models.decoding.stopwatch import StepSeconds, Stopwatch, part_of
from models.drafts.batched_proposer import ProposalSource, Proposer, Turn
from models.drafts.sampling import GREEDY, Sampling, chances
from models.drafts.trees import NO_PROPOSAL, ROOT, DynamicTree, Proposals, Tree
from models.targets.model import TargetModel

Shape = int | DynamicTree
"""Proposals per step: the length of a chain, 0 for none, or a tree."""


@dataclass(frozen=True)
class Decoded:
    """A continuation and how it came about."""

    tokens: tuple[int, ...]
    """The prefill token first; end of text included."""
    counts: AcceptedCounts
    """In a tree, the accepted tokens are those of the longest accepted path, and the lookahead is the tree's depth."""


@dataclass(frozen=True)
class StepDecision:
    """What a step emits: accepted proposals (their indexes, a path from the root) and the token that closes it."""

    path: tuple[int, ...]
    closing: int

    @property
    def kept(self) -> tuple[int, ...]:
        """The step's tokens that belong to the text: the last emitted one, then accepted proposals."""
        return (0, *(node + 1 for node in self.path))


def speculate(
    target: TargetModel,
    source: ProposalSource,
    prompt: Sequence[int],
    shape: Shape,
    max_new_tokens: int,
    eos_ids: frozenset[int],
    *,
    sampling: Sampling = GREEDY,
) -> Decoded:
    """Continue `prompt` by at most `max_new_tokens` tokens, exactly as the target alone would."""
    return speculate_together(target, source, [prompt], shape, max_new_tokens, eos_ids, sampling=sampling)[0]


def speculate_together(
    target: TargetModel,
    source: ProposalSource,
    prompts: Sequence[Sequence[int]],
    shape: Shape,
    max_new_tokens: int,
    eos_ids: frozenset[int],
    *,
    sampling: Sampling = GREEDY,
    watch: Stopwatch | None = None,
) -> list[Decoded]:
    """Continue all prompts at once, with one target forward per verification step of all; prefills run separately."""
    starts = [prefill(target, prompt, sampling) for prompt in prompts]
    conversations = [
        Conversation(target, source, start, shape, max_new_tokens, eos_ids, sampling=sampling) for start in starts
    ]
    decode_together(conversations, watch=watch)
    return [conversation.decoded() for conversation in conversations]


@torch.no_grad()
def decode_together(
    conversations: Sequence["Conversation"],
    *,
    watch: Stopwatch | None = None,
    choose: Callable[[Sequence["Conversation"]], int] | None = None,
) -> None:
    """Decode to the end: one target forward verifies a step of every conversation that is not over.

    All have the same target, source, temperature, top-k and top-p. Each draws by its own generator. `choose`, where
    given, names the lookahead of the next step of those that are going, instead of their own shapes.
    """
    going = [conversation for conversation in conversations if not conversation.over]
    if not going:
        return
    target, starts = going[0].target, [conversation.start for conversation in going]
    batch = TargetBatch(target, starts) if target.rewinds else ReplayBatch(target, starts)
    proposers, sampling = _proposers(going), going[0].sampling
    while going:
        written = sum(len(conversation.tokens) for conversation in going)
        if watch is not None:
            watch.steps.append(StepSeconds(len(going)))
        with part_of(watch, "draft"):
            trees = _propose(going, proposers, None if choose is None else choose(going))
        with part_of(watch, "realign"):
            tokens, placement = batch.place([conversation.tokens[-1] for conversation in going], trees)
        with part_of(watch, "target"):
            step = batch.verify(tokens, placement, trees)
        with part_of(watch, "decide"):
            decisions = _agree(step) if sampling.greedy else _sample(step, [each.sampling for each in going])
        with part_of(watch, "realign"):
            batch.keep([decision.kept for decision in decisions])
        with part_of(watch, "decide"):
            _observe(proposers, step, decisions)
            for row, (conversation, decision) in enumerate(zip(going, decisions, strict=True)):
                conversation.take(step.tokens[row], step.aux[row], decision)
        if watch is not None:
            watch.steps[-1].tokens = tokens.shape[1]
            watch.steps[-1].emitted = sum(len(conversation.tokens) for conversation in going) - written
        rows = [row for row, conversation in enumerate(going) if not conversation.over]
        if 0 < len(rows) < len(going):
            with part_of(watch, "realign"):
                batch.only(rows)
                proposers.only(rows)
        going = [going[row] for row in rows]


def _proposers(going: Sequence["Conversation"]) -> Proposer:
    first = going[0]
    rules = {(each.sampling.temperature, each.sampling.top_k, each.sampling.top_p) for each in going}
    assert len(rules) == 1
    assert all(conversation.source is first.source for conversation in going)
    found = first.source.proposers(len(going))
    if found.candidates:
        for row, conversation in enumerate(going):
            start, target = conversation.start, conversation.target
            prompt = torch.tensor(start.prompt, device=target.device)
            found.observe(row, prompt, likeliest_after(target, start.last, found.candidates))
    return found


def _propose(going: Sequence["Conversation"], proposers: Proposer, lookahead: int | None) -> list[Tree]:
    """What the next step verifies of every text; `lookahead` None: each text's own shape."""
    shapes = [conversation.shape if lookahead is None else lookahead for conversation in going]
    # A step without proposals leaves its features for the next step that has some.
    turns = {row: going[row].turn(shape) for row, shape in enumerate(shapes) if shape != 0}
    found = proposers.propose(turns) if turns else {}
    nothing = Tree(Proposals(torch.empty(0, dtype=torch.long, device=going[0].target.device), None), ())
    return [found.get(row, nothing) for row in range(len(going))]


def _observe(proposers: Proposer, step: Verification, decisions: Sequence[StepDecision]) -> None:
    """Tell observing proposers of the positions that the step adds to the texts."""
    if not proposers.candidates:
        return
    each = zip(step.tokens, step.logits.split(step.sizes), decisions, strict=True)
    for row, (tokens, logits, decision) in enumerate(each):
        read = torch.tensor([tokens[node] for node in decision.kept], device=logits.device)
        proposers.observe(row, read, logits[list(decision.kept)].topk(proposers.candidates).indices)


class Conversation:
    """One text while it is decoded: `turn` and `take` alternate until it is `over`.

    Raises Refusal for a negative lookahead.
    """

    def __init__(
        self,
        target: TargetModel,
        source: ProposalSource,
        start: Prefill,
        shape: Shape,
        max_new_tokens: int,
        eos_ids: frozenset[int],
        *,
        sampling: Sampling,
    ):
        if isinstance(shape, int) and shape < 0:
            raise Refusal(f"lookahead {shape}: 0 proposes nothing, 4 four tokens per step")
        self.target, self.source, self.start, self.sampling = target, source, start, sampling
        self.shape, self.max_new_tokens, self.eos_ids = shape, max_new_tokens, eos_ids
        self.tokens, self.accepted, self.cut, self.ended = [start.token], list[int](), 0, 0
        self._text, self._unread = [*start.prompt, start.token], [start.aux]

    @property
    def over(self) -> bool:
        return ended(self.tokens, self.max_new_tokens, self.eos_ids)

    def turn(self, shape: Shape) -> Turn:
        """The inputs for the next step's proposals."""
        aux, self._unread = self._unread[0] if len(self._unread) == 1 else torch.cat(self._unread), []
        return Turn(self._text, aux, shape, self.sampling)

    def take(self, tokens: Sequence[int], aux: Tensor, decision: StepDecision) -> None:
        """Go on with what a verification step decided of its `tokens`, whose features are `aux` `[n + 1, K*H]`."""
        kept, accepted = decision.kept, len(decision.path)
        self._unread.append(aux[: len(kept)] if kept[-1] == accepted else aux[list(kept)])
        emitted = [*(tokens[node] for node in kept[1:]), decision.closing]
        written = end_of(emitted[: self.max_new_tokens - len(self.tokens)], self.eos_ids)
        self.tokens += written
        self._text += written
        if len(written) == len(emitted):
            self.accepted.append(accepted)
        elif written[-1] in self.eos_ids:
            self.ended = len(written)
        else:
            self.cut += 1

    def decoded(self) -> Decoded:
        deepest = self.shape if isinstance(self.shape, int) else self.shape.depth
        return Decoded(tuple(self.tokens), AcceptedCounts(deepest, tuple(self.accepted), self.cut, self.ended))


def _agree(step: Verification) -> list[StepDecision]:
    """Greedy steps: proposals that are the target's own choices, one below the other, and its choice after them."""
    decisions, first, choices = [], 0, step.logits.argmax(-1).tolist()
    for tree, tokens in zip(step.trees, step.tokens, strict=True):
        path, here = [], ROOT
        # A parent stands before its children, so one pass finds the path.
        for node, parent in enumerate(tree.parents):
            if parent == here and tokens[node + 1] == choices[first + here + 1]:
                path.append(node)
                here = node
        decisions.append(StepDecision(tuple(path), choices[first + here + 1]))
        first += len(tree.parents) + 1
    return decisions


def _sample(step: Verification, samplings: Sequence[Sampling]) -> list[StepDecision]:
    """Sampled steps, decided row by row; smaller trees are padded with `NO_PROPOSAL`."""
    sizes, sampling = step.sizes, samplings[0]
    logits = pad_sequence(list(step.logits.split(sizes)), batch_first=True)
    vocabulary, size = logits.shape[-1], logits.shape[1] - 1
    proposals = [tree.proposals for tree in step.trees]
    tokens = pad_sequence([each.tokens for each in proposals], batch_first=True, padding_value=NO_PROPOSAL)
    q = pad_sequence([each.over(vocabulary) for each in proposals], batch_first=True)
    parents = [[*tree.parents, *[ROOT] * (size - len(tree.parents))] for tree in step.trees]
    places = torch.tensor(parents, dtype=torch.long, device=tokens.device).view(len(sizes), size)
    drawn = chances(samplings, sizes, tokens.device)
    accepted, closing = accept(sampling.distribution(logits), tokens, places, q, drawn)
    paths = [[] for _ in sizes]
    for row, node in accepted.nonzero().tolist():
        paths[row].append(node)
    return [StepDecision(tuple(path), token) for path, token in zip(paths, closing.tolist(), strict=True)]
