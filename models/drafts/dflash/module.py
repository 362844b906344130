"""DFlash (arXiv 2602.06036): a block of masks after the last known token, filled in by one forward.

The block's first row is the last known token, at position a; the others are masks at positions a + 1 .. a + B - 1, and
row k's output stands for the token at its own position. Every layer's attention sees the target's fused features of
positions 0 .. a - 1 as further keys and values. Embeddings and head are the target's, frozen. Parameter names are those
of SGLang's layout.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infra.refusal import Refusal
from models.config.dflash import DFlashConfig
from models.drafts.base import Draft, DraftLoss, PackedSamples, TargetProjection, supervised_positions
from models.drafts.batched_proposer import PackedTexts
from models.drafts.dflash.layers import BlockAttention, Blocks, DFlashLayer, KeysValues, PackedAttention, views
from models.drafts.dflash.proposer import DFlashProposer
from models.drafts.layers import RMSNorm
from models.drafts.rope import rotary_tables
from models.drafts.transfer import to_device
from models.drafts.trees import NO_PROPOSAL
from models.drafts.vocabulary import DraftVocabulary
from models.losses.chunked import TargetDistribution, chunked_loss
from models.losses.divergences import SoftCrossEntropy
from models.losses.position_weights import decay_weights, dpace_weights, token_probabilities

BLOCKS_AT_ONCE = 64
"""Blocks of a rollout whose rows and logits are alive at once."""


class DFlashDraft(Draft):
    """A DFlash draft for one target; it speaks once `start_from` has given it the target's head.

    Args:
        config: the method's knobs.
        embedding: `[V, H]` the target's raw token embeddings, shared and frozen.
        vocabulary: which target tokens the draft proposes, through the target head's rows of them.
        aux_layer_ids: the K target layers whose outputs it reads.

    Raises:
        Refusal: for a mask token that the target does not have.
    """

    embedding: Tensor
    target_ids: Tensor
    head: Tensor | None
    """`[Vd, H]` the target head's rows of the draft vocabulary."""

    def __init__(
        self, config: DFlashConfig, embedding: Tensor, vocabulary: DraftVocabulary, aux_layer_ids: Sequence[int]
    ):
        super().__init__()
        count, hidden_size = embedding.shape
        self.mask_token_id = count - 1 if config.mask_token_id is None else config.mask_token_id
        if self.mask_token_id >= count:
            raise Refusal(
                f"draft.mask_token_id {self.mask_token_id}: the target has {count} tokens, 0 to {count - 1}; leave it "
                "out for the last"
            )
        self.config, self.vocabulary, self.aux_layer_ids = config, vocabulary, tuple(aux_layer_ids)
        aux_count = len(self.aux_layer_ids)
        self.fc = nn.Linear(aux_count * hidden_size, hidden_size, bias=False)
        if config.fc_norm:
            norms = (RMSNorm(hidden_size, config.rms_norm_eps) for _ in range(aux_count))
            self.aux_hidden_norms = nn.ModuleList(norms)
        self.hidden_norm = RMSNorm(hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(config, hidden_size) for _ in config.layer_types)
        self.norm = RMSNorm(hidden_size, config.rms_norm_eps)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("head", None, persistent=False)
        self.register_buffer("target_ids", vocabulary.target_ids.clone(), persistent=False)

    @property
    def positions(self) -> int:
        return self.config.block_size - 1

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
        return [] if self.vocabulary.whole else ["vocab_size"]

    def engine_config(self) -> dict[str, Any] | None:
        """`config.json` as SGLang 0.5.23's `models/dflash.py` reads it; its layer ids are those of outputs, as ours."""
        config = self.config
        if self.engine_obstacles():
            return None
        return {
            **self._layer_config(),
            "architectures": ["DFlashLagunaForCausalLM" if config.fc_norm else "DFlashDraftModel"],
            "block_size": config.block_size,
            # Left out, it is false for full layers and true for sliding ones.
            **({"is_causal": False} if config.sliding_sees_ahead else {}),
            # Laguna's gate on the attention's output is none of DFlash's.
            **({"gating": False} if config.fc_norm else {}),
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.aux_layer_ids),
            },
        }

    def engine_copies(self) -> dict[str, Tensor]:
        """vLLM and speculators read the head's rows of a draft vocabulary from the draft."""
        if self.vocabulary.whole:
            return {}
        assert self.head is not None, "start_from gives the draft its head"
        return {"lm_head.weight": self.head}

    def speculators_config(self) -> dict[str, Any] | None:
        """For speculators' `DFlashDraftModel`, which calls the output of the target's layer l by the number l + 1.

        None with a norm per target feature, which it does not have, and with layers of both types: vLLM (0.33.0,
        transformers_utils/configs/speculators/algos.py) takes `sliding_window_non_causal` for every layer's attention,
        where here full layers see the whole block and sliding ones, unless they see ahead, its earlier positions.
        """
        config = self.config
        non_causal = "sliding_attention" not in config.layer_types or config.sliding_sees_ahead
        if config.fc_norm or (len(set(config.layer_types)) > 1 and not non_causal):
            return None
        return {
            "architectures": ["DFlashSpeculator"],
            "speculators_model_type": "dflash",
            "transformer_layer_config": self._layer_config(),
            "draft_vocab_size": len(self.vocabulary),
            "target_hidden_size": self.embedding.shape[1],
            "block_size": config.block_size,
            "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in self.aux_layer_ids],
            "mask_token_id": self.mask_token_id,
            "sliding_window_non_causal": non_causal,
            "sample_from_anchor": False,
        }

    def _layer_config(self) -> dict[str, Any]:
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
        """Normed hidden states `[A, B - 1, H]` of the masked positions of A blocks, in one forward."""
        config, device = self.config, features[0][0].device
        seen = {
            window: views(blocks, config.block_size, window, device, ahead=config.sliding_sees_ahead)
            for window in set(config.windows)
        }
        attentions = [
            PackedAttention(given, seen[window]) for given, window in zip(features, config.windows, strict=True)
        ]
        tokens, positions = to_device((blocks.tokens, blocks.positions), device)
        return self.fill_by(tokens, positions, attentions)

    def fill_by(self, tokens: Tensor, positions: Tensor, attentions: Sequence[BlockAttention]) -> Tensor:
        """Normed hidden states `[A, B - 1, H]` of the masked positions of blocks that begin with `tokens` `[A]` at
        `positions` `[A]`; the layers attend by `attentions`."""
        config, size = self.config, self.config.block_size
        offsets = torch.arange(size, device=tokens.device)
        masked = torch.where(offsets == 0, tokens[:, None], self.mask_token_id)
        hidden = F.embedding(masked.flatten(), self.embedding).to(self.fc.weight.dtype)
        tables = rotary_tables((positions[:, None] + offsets).flatten(), config)
        for layer, attention in zip(self._layers, attentions, strict=True):
            hidden = layer(hidden, tables, attention)
        return self.norm(hidden.view(len(tokens), size, -1)[:, 1:])

    def logits(self, normed: Tensor) -> Tensor:
        """`[..., H]` to `[..., Vd]` by the target's head, without the scale and soft cap of the target's own logits."""
        assert self.head is not None, "start_from gives the draft its head"
        return normed @ self.head.T

    @property
    def _layers(self) -> Sequence[DFlashLayer]:
        return list(self.layers)  # type: ignore[arg-type]

    def loss(self, batch: PackedSamples, target: TargetProjection, total: int, chunk_tokens: int) -> DraftLoss:
        """Soft cross-entropy of blocks that start at random supervised positions (see Draft.loss).

        A block is supervised up to its first unsupervised token. Where n of a sample's N possible blocks are drawn,
        each weighs N / n: over the draws the expected loss is that of all blocks, where each supervised position is
        proposed by up to B - 1 of them, as in EAGLE-3's training-time test. The draw depends on the sample's tokens
        and `anchor_seed` alone. Counts are of the drawn blocks. What the draft vocabulary lacks is not trained, and
        ends a block's accepted proposals.
        """
        positions, device = supervised_positions(batch.loss_mask, batch.lengths), batch.last.device
        count = len(positions)
        if not count:
            nothing = torch.zeros(self.positions, dtype=torch.int64, device=device)
            unused = sum((p.sum() * 0.0 for p in self.parameters()), start=batch.last.new_zeros(()))
            return DraftLoss(unused, nothing, nothing, count, count)
        places, starts, shares = self._draw(batch, positions)
        own = torch.cat([torch.arange(n) for n in batch.lengths])
        # Proposal k of a block at a is supervised as position a + k - 1, whose next token it is. The last position of
        # a sample never is supervised, so no block runs on into the next sample.
        predicted = places[:, None] + torch.arange(self.positions)
        keep = torch.zeros_like(batch.loss_mask).index_fill(0, positions, True)
        there = keep[predicted.clamp(max=len(keep) - 1)].cumprod(-1).bool()
        blocks, index = Blocks(batch.tokens[places], own[places], starts), predicted[there]
        chosen = there.flatten().nonzero().squeeze(-1)
        known, following = self._known(batch, index)
        covered = int(self._known(batch, positions)[0].sum())
        given = (own, chosen, index, following, there, shares, known)
        features, chosen, index, following, there, shares, known = to_device(given, device)
        hidden = self.fill(blocks, self.feature_keys(batch.aux, features))
        rows = hidden.flatten(0, 1)[chosen]
        if torch.is_autocast_enabled(rows.device.type):
            rows = rows.to(torch.get_autocast_dtype(rows.device.type))
        distribution = TargetDistribution(batch.last[index], target.rows, target.logit_scale, target.soft_cap)
        weights = self._weights(rows, target.rows, following, chosen, there, chunk_tokens) / shares[:, None]
        weights = ((weights / total).flatten()[chosen] * known).unsqueeze(1)
        loss, correct = chunked_loss([rows], target.rows, weights, distribution, SoftCrossEntropy(), chunk_tokens)
        accepted = _spread(correct.squeeze(1) & known, chosen, there).cumprod(-1)
        tried = there.clone()
        tried[:, 1:] &= accepted[:, :-1].bool()
        return DraftLoss(loss, accepted.sum(0), tried.sum(0), count, covered)

    def _known(self, batch: PackedSamples, positions: Tensor) -> tuple[Tensor, Tensor]:
        """`[P]` bool whether the next token of packed positions `[P]` can be proposed; the text's, a draft id or -1.

        The target's own next token decides, or the text's where that is not there.
        """
        following, vocabulary = batch.tokens[positions + 1], self.vocabulary
        if vocabulary.whole:
            return torch.ones_like(positions, dtype=torch.bool), following
        ids = torch.searchsorted(vocabulary.target_ids, following)
        decisive = following if batch.top is None else batch.top[positions]
        return vocabulary.t2d[decisive], ids.where(vocabulary.t2d[following], -1)

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
                drawn = _draw_without_order(tokens, self.config.anchor_seed, found, self.config.anchors)
                possible = possible[drawn]
            places.append(possible)
            starts.append(torch.full_like(possible, start))
            shares.append(torch.full_like(possible, len(possible) / max(1, found), dtype=torch.float32))
        return torch.cat(places), torch.cat(starts), torch.cat(shares)

    def _weights(
        self, rows: Tensor, head: Tensor, tokens: Tensor, chosen: Tensor, there: Tensor, chunk_tokens: int
    ) -> Tensor:
        """`[A, B - 1]` weights of the proposals; those that are not there may have any."""
        config = self.config
        if config.position_weights == "decay":
            return decay_weights(self.positions, config.decay_gamma, there.device).expand(there.shape)
        chances = token_probabilities(rows, head, tokens.clamp(min=0), chunk_tokens) * (tokens >= 0)
        return dpace_weights(_spread(chances, chosen, there), there, config.dpace_alpha)

    @torch.no_grad()
    def rollout(self, tokens: Tensor, aux: Tensor, lookahead: int) -> Tensor:
        """Proposals `[T, lookahead]` from every position of one sequence (see ProposalSource)."""
        texts, rows = PackedTexts(tokens[1:], aux, (len(aux),)), torch.arange(len(aux))
        best = torch.cat(
            [self.target_ids[self.logits(part).argmax(-1)] for part in self._blocks(texts, rows, lookahead)]
        )
        return F.pad(best, (0, lookahead - best.shape[1]), value=NO_PROPOSAL)

    def logits_along(self, texts: PackedTexts, lookahead: int, rows: Tensor) -> Iterator[Tensor]:
        """See `Draft.logits_along`; a block does not see what is proposed."""
        normed = torch.cat(list(self._blocks(texts, rows, lookahead)))
        return (self.logits(normed[:, step]) for step in range(normed.shape[1]))

    def _blocks(self, texts: PackedTexts, rows: Tensor, lookahead: int) -> Iterator[Tensor]:
        """Normed hidden states `[n, at most lookahead, H]` of the blocks after `rows`, some at a time."""
        places, _ = texts.places
        features, known = self.feature_keys(texts.aux, places), texts.following.cpu()
        places, starts = places.cpu() + 1, torch.arange(len(known)) - places.cpu()
        for part in rows.cpu().split(BLOCKS_AT_ONCE):
            yield self.fill(Blocks(known[part], places[part], starts[part]), features)[:, :lookahead]

    def proposers(self, count: int) -> "DFlashProposer":
        return DFlashProposer(self, count)


def _spread(values: Tensor, places: Tensor, like: Tensor) -> Tensor:
    """`values` `[Q]` at `places` of a flat zero tensor, in the shape of `like`."""
    return values.new_zeros(like.numel()).index_copy_(0, places, values).view(like.shape)


def _draw_without_order(tokens: Tensor, seed: int, count: int, most: int) -> Tensor:
    """`[most]` ascending indices below `count`, from the sample's tokens and the seed alone."""
    content = seed.to_bytes(8, "little", signed=True) + tokens.numpy().astype("<i8").tobytes()
    digest = hashlib.sha256(content).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.randperm(count, generator=generator)[:most].sort().values


DRAFT = DFlashDraft
