"""The stages of a target in Draftsmith's own process: prepared, captured, decoded. Each raises if it fails."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from models.capture.engine import check_capture
from models.capture.ranking import check_ranking
from models.config.draft import parse_draft_config
from models.config.target import TargetConfig
from models.decoding.continuations import continue_batch
from models.decoding.plain import continue_greedily, prefill
from models.decoding.speculative import Conversation, Shape, decode_together, speculate
from models.drafts.base import Draft, PackedSamples, TargetProjection
from models.drafts.batched_proposer import Turn
from models.drafts.registry import build_draft
from models.drafts.sampling import GREEDY
from models.drafts.trees import ROOT, DynamicTree, Proposals, Tree
from models.drafts.vocabulary import DraftVocabulary
from models.export.description import speculators_settings
from models.export.served_target import read_served_target
from models.export.sglang import load_draft, write_export
from models.targets.hidden_states import HiddenStates
from models.targets.layout import HiddenStateLayout
from models.targets.model import TargetModel
from models.targets.packed import pack_products
from models.targets.prepare import prepare_target
from models.targets.weights import read_target_head

AUX_LAYERS = (0, 1, 2)
NEVER: frozenset[int] = frozenset()
NEW_TOKENS = 20
SHORTEST, LONGEST = 30, 50
"""Tokens of a prompt: more than a sliding window or a chunk holds."""
LOOKAHEAD = 3
TRAINED_STEPS = 60
DRAFT = {
    "method": "eagle3", "vocab_size": None, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "intermediate_size": 128,
    "ttt_steps": 3, "fc_norm": True,
}  # fmt: skip
TREE = DynamicTree(3, 2, 8)


def prepare(folder: Path) -> None:
    """As a run prepares its target."""
    prepare_target(TargetConfig(name=str(folder), aux_layer_ids=AUX_LAYERS))


def random_prompts(count: int, vocabulary: int) -> list[list[int]]:
    """Ragged prompts."""
    generator = torch.Generator().manual_seed(11)
    lengths = torch.randint(SHORTEST, LONGEST, (count,), generator=generator).tolist()
    return [torch.randint(2, vocabulary - 8, (length,), generator=generator).tolist() for length in lengths]


@dataclass(frozen=True)
class Loaded:
    """A target, and what it writes after some prompts."""

    target: TargetModel
    prompts: list[list[int]]
    texts: list[list[int]]


def load(folder: Path) -> Loaded:
    """Load a target in float32, and have it continue prompts."""
    target = TargetModel.load(folder, AUX_LAYERS, torch.float32)
    prompts = random_prompts(3, len(target.head_weight))
    return Loaded(target, prompts, [continue_greedily(target, prompt, NEW_TOKENS, NEVER) for prompt in prompts])


def captured(target: TargetModel, tokens: Tensor) -> tuple[HiddenStates, HiddenStateLayout]:
    """What a generator captures of `tokens` `[T]`, and how it is stored."""
    states = target.forward(tokens[None])
    hidden = HiddenStates(states.aux[0], states.last[0], target.top_tokens(states.last[0]))
    return hidden, HiddenStateLayout(len(AUX_LAYERS), states.last.shape[-1], states.last.dtype, top_token=True)


def check_canary(loaded: Loaded) -> None:
    """Captured layers, final states and top tokens are those of transformers' own forward."""
    tokens = torch.tensor(loaded.prompts[0])
    hidden, layout = captured(loaded.target, tokens)
    check_capture(loaded.target, hidden, tokens, layout)


def check_canary_in_bfloat16(loaded: Loaded, folder: Path) -> None:
    """The same with the target in bfloat16."""
    check_canary(Loaded(TargetModel.load(folder, AUX_LAYERS, torch.bfloat16), loaded.prompts, []))


def check_packed(loaded: Loaded, folder: Path) -> None:
    """The benchmark's decoder, whose products are computed otherwise in bfloat16, reads what the plain one reads."""
    plain, packed = (TargetModel.load(folder, AUX_LAYERS, torch.bfloat16) for _ in range(2))
    pack_products(packed)
    for prompt in loaded.prompts:
        ours, theirs = (target.forward(torch.tensor([prompt])).aux[0].float() for target in (packed, plain))
        # Most rows: a router of experts may decide otherwise between two that are nearly equal.
        assert ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).median() < 0.02


def check_large(loaded: Loaded, folder: Path, converted: Path) -> None:
    """The canary of a target that is too large to be loaded: weights are read one by one."""
    tokens, head = torch.tensor(loaded.prompts[0]), read_target_head(folder, torch.float32)
    hidden, layout = captured(loaded.target, tokens)
    check_ranking(TargetModel.streamed(folder, AUX_LAYERS, torch.float32, head, converted), hidden, tokens, layout)


@torch.no_grad()
def check_head(loaded: Loaded, folder: Path) -> None:
    """The embedding and head that the trainer reads from the files give the target's own logits."""
    head, target, tokens = read_target_head(folder, torch.float32), loaded.target, torch.tensor(loaded.prompts[:1])
    own = target.model(tokens).logits[0]
    torch.testing.assert_close(head.logits(target.forward(tokens).last[0]), own, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(head.embedding, target.model.get_input_embeddings().weight, rtol=0, atol=0)


def check_plain(loaded: Loaded) -> None:
    """Cached decoding, alone and in batches, writes what one forward over the whole text says."""
    target = loaded.target
    for prompt, text in zip(loaded.prompts, loaded.texts, strict=True):
        last = target.forward(torch.tensor([[*prompt, *text[:-1]]])).last[0, len(prompt) - 1 :]
        assert target.logits(last).argmax(-1).tolist() == text, "cached decoding differs from a forward without a cache"
    assert continue_batch(target, loaded.prompts, NEW_TOKENS, NEVER) == loaded.texts, "batches differ"


def check_chain(loaded: Loaded) -> None:
    """A chain of proposals, some right and some wrong, one text at a time."""
    for row in range(len(loaded.prompts)):
        _check_decoding(loaded, [row], [LOOKAHEAD])


def check_tree(loaded: Loaded) -> None:
    """A tree of proposals, one text at a time."""
    for row in range(len(loaded.prompts)):
        _check_decoding(loaded, [row], [TREE])


def check_batch(loaded: Loaded) -> None:
    """Chains of different lengths and a tree, all texts in one forward."""
    _check_decoding(loaded, [0, 1, 2], [LOOKAHEAD, 1, TREE])


def train(loaded: Loaded, folder: Path) -> Draft:
    """Train an EAGLE-3 draft on the target's own texts until it accepts some of them."""
    head = read_target_head(folder, torch.float32)
    config = parse_draft_config(DRAFT)
    vocabulary = DraftVocabulary(torch.arange(len(head.embedding)), len(head.embedding))
    draft = build_draft(config, head.embedding, vocabulary, AUX_LAYERS)
    draft.start_from(head.head)
    batch = _packed(loaded)
    projection = TargetProjection(head.head, None, head.logit_scale, head.soft_cap)
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], 1e-2)
    losses = []
    for _ in range(TRAINED_STEPS):
        loss = draft.loss(batch, projection, int(batch.loss_mask.sum()), 1024).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1, f"the loss went from {losses[0]:.3g} to {losses[-1]:.3g}"
    return draft.eval()


def _packed(loaded: Loaded) -> PackedSamples:
    """The prompts with their continuations, as the trainer gets them."""
    texts = [[*prompt, *text] for prompt, text in zip(loaded.prompts, loaded.texts, strict=True)]
    states = [loaded.target.forward(torch.tensor([text])) for text in texts]
    tokens = torch.tensor([token for text in texts for token in text])
    return PackedSamples(
        tokens=tokens,
        loss_mask=torch.ones(len(tokens), dtype=torch.bool),
        aux=torch.cat([each.aux[0] for each in states]),
        last=torch.cat([each.last[0] for each in states]),
        lengths=tuple(map(len, texts)),
    )


def export(loaded: Loaded, folder: Path, draft: Draft, exported: Path) -> None:
    """Write the draft, read it back, and decode with it: the target's own text, some of it proposed by the draft."""
    served = read_served_target(folder)
    write_export(draft, exported, {}, served, speculators_settings(draft, served, None, LOOKAHEAD))
    source = load_draft(exported, folder, torch.float32)
    accepted = 0
    for prompt, text in zip(loaded.prompts, loaded.texts, strict=True):
        decoded = speculate(loaded.target, source, prompt, LOOKAHEAD, NEW_TOKENS, NEVER)
        assert list(decoded.tokens) == text, "speculative text differs from the target's own"
        accepted += sum(decoded.counts.accepted)
    assert accepted, "the trained draft's proposals were never accepted"


def _check_decoding(loaded: Loaded, rows: Sequence[int], shapes: Sequence[Shape]) -> None:
    known = {tuple(prompt): text for prompt, text in zip(loaded.prompts, loaded.texts, strict=True)}
    source = HalfRight(known, len(loaded.target.head_weight))
    texts = [
        Conversation(
            loaded.target, source, prefill(loaded.target, loaded.prompts[row]), shape, NEW_TOKENS, NEVER,
            sampling=GREEDY,
        )
        for row, shape in zip(rows, shapes, strict=True)
    ]  # fmt: skip
    decode_together(texts)
    for row, shape, text in zip(rows, shapes, texts, strict=True):
        assert text.tokens == loaded.texts[row], "speculative text differs from the target's own"
        depth = shape if isinstance(shape, int) else shape.depth
        assert any(text.accepted), "nothing was accepted"
        assert min(text.accepted) < depth, "nothing was rejected"


@dataclass
class HalfRight:
    """Proposes a target's known texts, with an error at every third place."""

    texts: Mapping[tuple[int, ...], list[int]]
    """Continuations by prompt."""
    vocabulary: int
    branches, candidates, confidences = True, 0, None

    def proposers(self, count: int) -> "HalfRight":
        return self

    def observe(self, row: int, tokens: Tensor, likeliest: Tensor) -> None:
        raise AssertionError

    def only(self, rows: Sequence[int]) -> None:
        """Rows are told apart by their texts."""

    def propose(self, turns: Mapping[int, Turn]) -> dict[int, Tree]:
        return {row: self._tree(turn) for row, turn in turns.items()}

    def _tree(self, turn: Turn) -> Tree:
        prompt, text = next(pair for pair in self.texts.items() if tuple(turn.text[: len(pair[0])]) == pair[0])
        first = len(turn.text) - len(prompt)
        depth = turn.shape if isinstance(turn.shape, int) else turn.shape.depth
        own = [self._other(token, place % 3 == 2) for place, token in enumerate(text)][first : first + depth]
        if isinstance(turn.shape, int):
            return Tree.chain(Proposals(torch.tensor(own, dtype=torch.long), None))
        # At each depth the proposed token, after or before a wrong one, both with the same parent.
        tokens, parents, parent = [], [], ROOT
        for place, token in enumerate(own):
            right = place % 2
            wrong = self._other(token, 2)
            tokens += [token, wrong] if right == 0 else [wrong, token]
            parents += [parent, parent]
            parent = len(tokens) - 2 + right
        return Tree(Proposals(torch.tensor(tokens, dtype=torch.long), None), tuple(parents))

    def _other(self, token: int, distance: int) -> int:
        return (token + distance) % self.vocabulary
