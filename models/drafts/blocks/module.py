"""Drafts that fill a block in one forward: the last known token and masks (DFlash, arXiv 2602.06036).

The block's first row is the last known token, at position a; the others are masks at positions a + 1 .. a + B - 1.
Every layer's attention sees the target's fused features of positions 0 .. a - 1 as further keys and values. Row k's
output stands for the token at its own position, so the first row's is of no use; or, in the layout "anchor first", for
the token after its position. Embeddings and head are the target's, frozen. Parameter names are those of SGLang's
layout.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infra.refusal import Refusal
from models.config.blocks import BlockConfig
from models.drafts.base import Draft, DraftLoss, PackedSamples, TargetProjection, supervised_positions
from models.drafts.batched_proposer import PackedTexts
from models.drafts.blocks.layers import BlockAttention, BlockLayer, Blocks, KeysValues, PackedAttention, views
from models.drafts.blocks.proposer import BlockProposer
from models.drafts.chains import can_propose
from models.drafts.layers import RMSNorm
from models.drafts.rope import rotary_tables
from models.drafts.transfer import to_device
from models.drafts.trees import NO_PROPOSAL
from models.drafts.vocabulary import DraftVocabulary
from models.losses.chunked import Factor, LossDivergence, SummedLoss, chunked_loss
from models.losses.divergences import MixedLoss, SoftCrossEntropy
from models.losses.position_weights import decay_weights

BLOCKS_AT_ONCE = 64
"""Blocks of a rollout whose rows and logits are alive at once."""


class Scored(NamedTuple):
    """The supervised proposals of a micro-batch, Q in all, of A blocks with S proposals each."""

    rows: Tensor
    """`[Q, H]` normed hidden states, in the dtype of products."""
    chosen: Tensor
    """`[Q]` int64 where they stand among the A * S."""
    there: Tensor
    """`[A, S]` bool, whether a proposal is supervised."""
    previous: Tensor
    """`[A, S]` int64 target ids of the text's tokens before each proposal."""
    labels: Tensor
    """`[Q]` int64 draft ids of the text's own tokens, -1 for what the draft vocabulary lacks."""


class BlockDraft(Draft):
    """A draft for one target; it speaks once `start_from` has given it the target's head.

    Args:
        config: the method's knobs.
        embedding: `[V, H]` the target's raw token embeddings, shared and frozen.
        vocabulary: which target tokens the draft proposes, through the target head's rows of them.
        aux_layer_ids: the K target layers whose outputs it reads.

    Raises:
        Refusal: for a mask token that the target does not have.
    """

    config: BlockConfig
    embedding: Tensor
    head: Tensor | None
    """`[Vd, H]` the target head's rows of the draft vocabulary."""
    engine_class: str
    """Of SGLang and vLLM."""
    unserved: tuple[str, ...] = ("fc_norm",)
    """Settings of which this class has nothing."""

    def __init__(
        self, config: BlockConfig, embedding: Tensor, vocabulary: DraftVocabulary, aux_layer_ids: Sequence[int]
    ):
        super().__init__(config, vocabulary, aux_layer_ids)
        count, hidden_size = embedding.shape
        self.mask_token_id = count - 1 if config.mask_token_id is None else config.mask_token_id
        if self.mask_token_id >= count:
            raise Refusal(
                f"draft.mask_token_id {self.mask_token_id}: the target has {count} tokens, 0 to {count - 1}; leave it "
                "out for the last"
            )
        aux_count = len(self.aux_layer_ids)
        self.fc = nn.Linear(aux_count * hidden_size, hidden_size, bias=False)
        if config.fc_norm:
            norms = (RMSNorm(hidden_size, config.rms_norm_eps) for _ in range(aux_count))
            self.aux_hidden_norms = nn.ModuleList(norms)
        self.hidden_norm = RMSNorm(hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(self.make_layer(hidden_size) for _ in config.layer_types)
        self.norm = RMSNorm(hidden_size, config.rms_norm_eps)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("head", None, persistent=False)

    def make_layer(self, hidden_size: int) -> BlockLayer:
        """One of the draft's layers."""
        return BlockLayer(self.config, hidden_size)

    @property
    def positions(self) -> int:
        return self.config.proposals

    @property
    def loss_logits(self) -> int:
        """The loss has one row for each proposal."""
        return len(self.vocabulary)

    def hold_embeddings(self, dtype: torch.dtype) -> None:
        self.embedding = self.embedding.to(dtype)

    def start_from(self, head: Tensor) -> None:
        """Use the target's head, which is not exported whole."""
        assert head.shape == self.embedding.shape
        rows = head if self.vocabulary.whole else head[self.target_ids.to(head.device)]
        self.head = rows.to(self.embedding)

    def engine_obstacles(self) -> list[str]:
        """SGLang proposes through the target's whole head."""
        part = [] if self.vocabulary.whole else ["vocab_size"]
        return part + [name for name in self.unserved if getattr(self.config, name)]

    def engine_config(self) -> dict[str, Any] | None:
        """`config.json` as SGLang 0.5.23 reads it (`models/dflash.py`, `models/dspark.py`), and vLLM 0.33; their layer
        ids are those of outputs, as ours."""
        if self.engine_obstacles():
            return None
        config = self.config
        read = {"mask_token_id": self.mask_token_id, "target_layer_ids": list(self.aux_layer_ids)}
        return {
            **self.layer_config(),
            "architectures": [self.engine_class],
            "block_size": config.block_size,
            # Left out, it is false for full layers and true for sliding ones.
            **({"is_causal": False} if config.sliding_sees_ahead else {}),
            "dflash_config": read | self.engine_settings(),
        }

    def engine_settings(self) -> dict[str, Any]:
        """The method's own keys of `dflash_config`."""
        return {}

    def engine_copies(self) -> dict[str, Tensor]:
        """vLLM and speculators read the head's rows of a draft vocabulary from the draft."""
        if self.vocabulary.whole:
            return {}
        assert self.head is not None, "start_from gives the draft its head"
        return {"lm_head.weight": self.head}

    def layer_config(self) -> dict[str, Any]:
        """Hugging Face's `Qwen3Config`."""
        config, (vocabulary, hidden) = self.config, self.embedding.shape
        return config.engine_layers(hidden, vocabulary) | {
            "model_type": "qwen3",
            "layer_types": list(config.layer_types),
            # Without it Hugging Face's Qwen3Config forgets the window.
            "use_sliding_window": config.sliding_window is not None,
            "sliding_window": config.sliding_window,
        }

    def feature_keys(self, aux: Tensor, positions: Tensor) -> list[KeysValues]:
        """Target features `[N, K*H]` at `positions` `[N]` as every layer's keys and values."""
        config = self.config
        aux = aux.to(self.fc.weight.dtype)
        if config.fc_norm:
            chunks = aux.chunk(len(self.aux_layer_ids), dim=-1)
            aux = torch.cat([norm(chunk) for norm, chunk in zip(self.aux_hidden_norms, chunks, strict=True)], dim=-1)
        fused = self.hidden_norm(self.fc(aux))
        tables = rotary_tables(positions, config)
        return [
            layer.self_attn.keys_values(layer.input_layernorm(fused) if config.fc_norm else fused, tables)
            for layer in self._layers
        ]

    def fill(self, blocks: Blocks, features: Sequence[KeysValues]) -> Tensor:
        """Normed hidden states `[A, S, H]` of the proposing rows of A blocks, in one forward."""
        config, device = self.config, features[0][0].device
        seen = {
            window: views(blocks, config.block_size, window, features[0][0], ahead=config.sliding_sees_ahead)
            for window in set(config.windows)
        }
        attentions = [
            PackedAttention(given, seen[window]) for given, window in zip(features, config.windows, strict=True)
        ]
        tokens, positions = to_device((blocks.tokens, blocks.positions), device)
        return self.fill_by(tokens, positions, attentions)

    def fill_by(self, tokens: Tensor, positions: Tensor, attentions: Sequence[BlockAttention]) -> Tensor:
        """Normed hidden states `[A, S, H]` of the proposing rows of blocks that begin with `tokens` `[A]` at
        `positions` `[A]`; the layers attend by `attentions`."""
        config, size = self.config, self.config.block_size
        offsets = torch.arange(size, device=tokens.device)
        masked = torch.where(offsets == 0, tokens[:, None], self.mask_token_id)
        hidden = F.embedding(masked.flatten(), self.embedding).to(self.fc.weight.dtype)
        tables = rotary_tables((positions[:, None] + offsets).flatten(), config)
        for layer, attention in zip(self._layers, attentions, strict=True):
            hidden = layer(hidden, tables, attention)
        first = 0 if config.anchor_first else 1
        return self.norm(hidden.view(len(tokens), size, -1)[:, first : first + self.positions])

    def logits(self, normed: Tensor) -> Tensor:
        """`[..., H]` to `[..., Vd]` by the target's head, without the scale and soft cap of the target's own logits."""
        assert self.head is not None, "start_from gives the draft its head"
        return normed @ self.head.T

    def step_logits(self, normed: Tensor, previous: Callable[[int], Tensor]) -> Iterator[Tensor]:
        """Logits `[n, Vd]` of each proposal in turn.

        Args:
            normed: `[n, s, H]` hidden states of the first s proposing rows.
            previous: gives the tokens `[n]` before proposal k, once proposal k is asked for; at 0 the known ones.
        """
        return (self.logits(normed[:, step]) for step in range(normed.shape[1]))

    def confidences(self, normed: Tensor, previous: Sequence[Tensor]) -> Tensor | None:
        """Logits `[n, s]` of the chance that each proposal is accepted if those before it are; None: not told.

        Args:
            normed: `[n, s, H]` hidden states of the first s proposing rows.
            previous: s times `[n]` int64, the tokens before each proposal.
        """
        return None

    @property
    def _layers(self) -> Sequence[BlockLayer]:
        return list(self.layers)  # type: ignore[arg-type]

    def loss(self, batch: PackedSamples, target: TargetProjection, total: int, chunk_tokens: int) -> DraftLoss:
        """The configured loss of blocks that start at random positions of `anchors` (see Draft.loss).

        A block is supervised up to its first unsupervised token. Where n of a sample's N possible blocks are drawn,
        each weighs N / n: over the draws the expected loss is that of all blocks, where each supervised position is
        proposed by up to S of them, as in EAGLE-3's training-time test. The draw depends on the sample's tokens,
        `anchor_seed` and the epoch alone. Counts are of the drawn blocks. What the draft vocabulary lacks is not
        trained, and ends a block's accepted proposals.
        """
        positions, device = supervised_positions(batch.loss_mask, batch.lengths), batch.last.device
        count, anchors = len(positions), self.anchors(batch, positions)
        covered = int(can_propose(batch, positions, positions, self.vocabulary).sum())
        if not len(anchors):
            nothing = torch.zeros(self.positions, dtype=torch.int64, device=device)
            unused = sum((p.sum() * 0.0 for p in self.parameters()), start=batch.last.new_zeros(()))
            return DraftLoss(unused, nothing, nothing, count, covered)
        places, starts, shares = self._draw(batch, anchors)
        own = torch.cat([torch.arange(n) for n in batch.lengths])
        # Proposal k of a block at a is supervised as position a + k - 1, whose next token it is. The last position of
        # a sample never is supervised, so no block runs on into the next sample.
        predicted = places[:, None] + torch.arange(self.positions)
        keep = torch.zeros_like(batch.loss_mask).index_fill(0, positions, True)
        there = keep[predicted.clamp(max=len(keep) - 1)].cumprod(-1).bool()
        blocks, index = Blocks(batch.tokens[places], own[places], starts), predicted[there]
        chosen = there.flatten().nonzero().squeeze(-1)
        previous = batch.tokens[predicted.clamp(max=len(batch.tokens) - 1)]
        known, labels = can_propose(batch, index, index, self.vocabulary), self._labels(batch.tokens[index + 1])
        given = (own, chosen, index, labels, there, shares, known, previous)
        features, chosen, index, labels, there, shares, known, previous = to_device(given, device)
        hidden = self.fill(blocks, self.feature_keys(batch.aux, features))
        rows = hidden.flatten(0, 1)[chosen]
        if torch.is_autocast_enabled(rows.device.type):
            rows = rows.to(torch.get_autocast_dtype(rows.device.type))
        scored = Scored(rows, chosen, there, previous, labels)
        weights = self.weights(scored, target.rows, chunk_tokens) / shares[:, None]
        weights = (weights / total).flatten()[chosen] * known
        found = self.summed(scored, hidden, weights, batch.last[index], target, chunk_tokens)
        accepted = spread(found.correct.squeeze(1) & known, chosen, there).cumprod(-1)
        tried = there.clone()
        tried[:, 1:] &= accepted[:, :-1].bool()
        return DraftLoss(found.loss, accepted.sum(0), tried.sum(0), count, covered)

    def summed(
        self,
        scored: Scored,
        hidden: Tensor,
        weights: Tensor,
        last: Tensor,
        target: TargetProjection,
        chunk_tokens: int,
    ) -> SummedLoss:
        """The loss of the Q rows with one step each; `weights` `[Q]`, `last` `[Q, H]` the target's states."""
        found = self.compared(scored, weights, last, target, chunk_tokens, self.biases(scored, hidden))
        more = self.further_loss(scored, weights, found.acceptance.squeeze(1))
        return found if more is None else found._replace(loss=found.loss + more)

    def compared(
        self,
        scored: Scored,
        weights: Tensor,
        last: Tensor,
        target: TargetProjection,
        chunk_tokens: int,
        biases: Sequence[Factor] = (),
    ) -> SummedLoss:
        """The configured divergence of the Q rows' logits, with `biases` added, from the target's."""
        distribution = target.distribution(last, self.vocabulary.whole, self.target_ids)
        distribution, divergence = replace(distribution, labels=scored.labels), self.divergence()
        given = ([scored.rows], target.rows, weights.unsqueeze(1), distribution, divergence, chunk_tokens)
        return chunked_loss(*given, more=biases)

    def anchors(self, batch: PackedSamples, positions: Tensor) -> Tensor:
        """Packed positions at which blocks may start: the next token is supervised at all of `positions`."""
        return positions

    def divergence(self) -> LossDivergence:
        """What the configuration names."""
        config = self.config
        if (config.cross_entropy_weight, config.kl_weight, config.tv_weight) == (0, 1, 0):
            return SoftCrossEntropy()
        return MixedLoss(config.cross_entropy_weight, config.kl_weight, config.tv_weight)

    def weights(self, scored: Scored, head: Tensor, chunk_tokens: int) -> Tensor:
        """`[A, S]` weights of the proposals; those that are not there may have any."""
        return decay_weights(self.positions, self.config.decay_gamma, scored.there.device).expand(scored.there.shape)

    def biases(self, scored: Scored, hidden: Tensor) -> Sequence[Factor]:
        """What a method adds to the logits of the Q rows; `hidden` `[A, S, H]` are those of all proposals."""
        return ()

    def further_loss(self, scored: Scored, weights: Tensor, acceptance: Tensor) -> Tensor | None:
        """What a method adds to the loss; `weights` and `acceptance` `[Q]`, without gradients."""
        return None

    def _labels(self, tokens: Tensor) -> Tensor:
        """The draft ids of target tokens `[P]`, -1 for what the draft vocabulary lacks."""
        if self.vocabulary.whole:
            return tokens
        ids = torch.searchsorted(self.vocabulary.target_ids, tokens)
        return ids.where(self.vocabulary.t2d[tokens], -1)

    def _draw(self, batch: PackedSamples, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Where blocks start: packed places, where their samples start, and the share of its sample's that each was
        drawn among; `[A]` each."""
        places, starts, shares = [], [], []
        bounds = [0, *torch.tensor(batch.lengths).cumsum(0).tolist()]
        edges = torch.searchsorted(positions, torch.tensor(bounds)).tolist()
        for index, start in enumerate(bounds[:-1]):
            possible = positions[edges[index] : edges[index + 1]]
            found = len(possible)
            if found > self.config.anchors:
                tokens = batch.tokens[start : bounds[index + 1]]
                drawn = _draw_without_order(tokens, self.config.anchor_seed, self.epoch, found, self.config.anchors)
                possible = possible[drawn]
            places.append(possible)
            starts.append(torch.full_like(possible, start))
            shares.append(torch.full_like(possible, len(possible) / max(1, found), dtype=torch.float32))
        return torch.cat(places), torch.cat(starts), torch.cat(shares)

    @torch.no_grad()
    def rollout(self, tokens: Tensor, aux: Tensor, lookahead: int, first: int = 0) -> Tensor:
        """Proposals `[T - first, lookahead]` from the positions of one sequence (see RolloutSource)."""
        texts, rows, found = PackedTexts(tokens[1:], aux, (len(aux),)), torch.arange(first, len(aux)), list[Tensor]()
        for part, normed in self._blocks(texts, rows, lookahead):
            chosen = [texts.following[part]]
            for logits in self.step_logits(normed, lambda step, chosen=chosen: chosen[step]):
                chosen.append(self.target_ids[logits.argmax(-1)])
            found.append(torch.stack(chosen[1:], dim=1))
        best = torch.cat(found)
        return F.pad(best, (0, lookahead - best.shape[1]), value=NO_PROPOSAL)

    def logits_along(self, texts: PackedTexts, lookahead: int, rows: Tensor) -> Iterator[Tensor]:
        """See `Draft.logits_along`; rows whose text ends before a step's token run on other tokens, to no effect."""
        normed = torch.cat([each for _, each in self._blocks(texts, rows, lookahead)])
        text = F.pad(texts.following, (0, lookahead))
        return self.step_logits(normed, lambda step: text[rows + step])

    def _blocks(self, texts: PackedTexts, rows: Tensor, lookahead: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Some of `rows`, and normed hidden states `[n, at most lookahead, H]` of the blocks after them."""
        places, _ = texts.places
        features, known = self.feature_keys(texts.aux, places), texts.following.cpu()
        places, starts = places.cpu() + 1, torch.arange(len(known)) - places.cpu()
        for part in rows.cpu().split(BLOCKS_AT_ONCE):
            filled = self.fill(Blocks(known[part], places[part], starts[part]), features)
            yield part.to(texts.following.device), filled[:, :lookahead]

    def proposers(self, count: int) -> "BlockProposer":
        return BlockProposer(self, count)


def spread(values: Tensor, places: Tensor, like: Tensor) -> Tensor:
    """`values` `[Q]` at `places` of a flat zero tensor, in the shape of `like`."""
    return values.new_zeros(like.numel()).index_copy_(0, places, values).view(like.shape)


def _draw_without_order(tokens: Tensor, seed: int, epoch: int, count: int, most: int) -> Tensor:
    """`[most]` ascending indices below `count`, from the sample's tokens, the seed and the epoch alone."""
    # Nothing is added for the first epoch, whose draws stay those of earlier releases.
    salt = seed.to_bytes(8, "little", signed=True) + (epoch.to_bytes(8, "little") if epoch else b"")
    content = salt + tokens.numpy().astype("<i8").tobytes()
    digest = hashlib.sha256(content).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.randperm(count, generator=generator)[:most].sort().values
