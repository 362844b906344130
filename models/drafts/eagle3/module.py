"""EAGLE-3 (arXiv 2503.01840): decoder layers, usually one, over the next token's embedding and the target's features.

Row i of a sequence takes the target's features of position i and the embedding of token i+1, and predicts token i+2.
In step j of the training-time test (and of a chain while decoding) it takes its own output of step j-1 and the
embedding of token i+1+j, and predicts token i+2+j. Parameter names are those of SGLang's `LlamaForCausalLMEagle3`
(0.5.23) and of speculators' `Eagle3DraftModel` (0.9.0): `fc`, `fc_norm.*` or `input_norm`, `layers.0.*`, `norm`,
`lm_head`, `embed_tokens`. A row of step j stands at position i + j, in every layer.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.config.eagle3 import Eagle3Config
from models.drafts.base import Draft, DraftLoss, PackedSamples, TargetProjection
from models.drafts.batched_proposer import PackedTexts
from models.drafts.chains import chain_loss
from models.drafts.context import ContextShare
from models.drafts.eagle3.attention import Earlier, step_attention
from models.drafts.eagle3.branches import ranks_along
from models.drafts.eagle3.engines import sglang_config, sglang_obstacles, speculators_config
from models.drafts.eagle3.layers import Eagle3Layer, Eagle3Weights
from models.drafts.eagle3.proposer import Eagle3Proposer
from models.drafts.layers import RMSNorm, TargetTable
from models.drafts.rope import rotary_tables
from models.drafts.row_functions import compute_dtype
from models.drafts.transfer import to_device
from models.drafts.vocabulary import DraftVocabulary

RECOMPUTED_ROWS = 8192
"""Rows whose inner activations are alive at once where the layer is computed again."""

NextTokens = Callable[[int, Tensor], Tensor]
"""(step j >= 1, normed hidden states of step j-1 `[N, H]`) -> tokens `[N]` that step j embeds."""


class Eagle3Draft(Draft):
    """An EAGLE-3 draft for one target.

    Args:
        config: the method's knobs.
        embedding: `[V, H]` the target's raw token embeddings.
        vocabulary: which target tokens the draft proposes.
        aux_layer_ids: the K target layers whose outputs it reads.
    """

    target_ids: Tensor

    def __init__(
        self, config: Eagle3Config, embedding: Tensor, vocabulary: DraftVocabulary, aux_layer_ids: Sequence[int]
    ):
        super().__init__()
        self.target_hidden_size = embedding.shape[1]
        self.hidden_size = hidden_size = config.hidden_size or self.target_hidden_size
        self.config, self.vocabulary, self.aux_layer_ids = config, vocabulary, tuple(aux_layer_ids)
        aux_count, eps = len(self.aux_layer_ids), config.rms_norm_eps
        self.fc = nn.Linear(aux_count * self.target_hidden_size, hidden_size, bias=config.fc_bias)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(self.target_hidden_size, eps) for _ in range(aux_count))
        if config.norm_before_fc:
            self.input_norm = RMSNorm(aux_count * self.target_hidden_size, eps)
        self.layers = nn.ModuleList(
            Eagle3Layer(config, hidden_size, first=index == 0) for index in range(len(config.layer_types))
        )
        self.norm = RMSNorm(hidden_size, eps)
        # SGLang takes a head that is not stored from the target, whole.
        stored = not (config.shared_head and vocabulary.whole)
        head = nn.Linear(hidden_size, len(vocabulary), bias=False).weight
        self.lm_head = TargetTable(head, trained=not config.shared_head, stored=stored)
        own = self.has_own_embeddings
        self.embed_tokens = TargetTable(_as_wide(embedding, hidden_size), trained=own, stored=own)
        self.register_buffer("target_ids", vocabulary.target_ids.clone(), persistent=False)

    @property
    def decoder_layers(self) -> list[Eagle3Layer]:
        """`layers`, by their type."""
        return list(self.layers)  # type: ignore[arg-type]

    @property
    def has_own_embeddings(self) -> bool:
        """Whether its embeddings are trained: by choice, or because the target's have another size."""
        return self.config.train_embeddings or self.hidden_size != self.target_hidden_size

    @property
    def positions(self) -> int:
        return self.config.ttt_steps

    def hold_embeddings(self, dtype: torch.dtype) -> None:
        if not self.has_own_embeddings:
            self.embed_tokens.weight = self.embed_tokens.weight.to(dtype)

    def start_from(self, head: Tensor) -> None:
        """The draft head starts as the target head's rows of the draft vocabulary; a shared one stays so.

        Of a draft of another size, it starts as their first columns, and so do its embeddings: hidden dimensions have
        no order, so any columns keep the directions of tokens as well.
        """
        rows = head if self.vocabulary.whole else head[self.target_ids]
        self.lm_head.start_as(_as_wide(rows, self.hidden_size))

    def engine_obstacles(self) -> list[str]:
        return sglang_obstacles(self)

    def engine_config(self) -> dict[str, Any] | None:
        return sglang_config(self)

    def engine_copies(self) -> dict[str, Tensor]:
        """SGLang calls the first norm of every layer after the first `hidden_norm`, vLLM and speculators as we do."""
        later = list(enumerate(self.decoder_layers))[1:]
        return {f"layers.{index}.hidden_norm.weight": layer.input_layernorm.weight.clone() for index, layer in later}

    def speculators_config(self) -> dict[str, Any] | None:
        return speculators_config(self)

    def fuse(self, aux: Tensor) -> Tensor:
        """Target features `[N, K*H]` to the draft's input `[N, h]`."""
        aux = aux.to(compute_dtype(self.fc.weight))
        if self.config.norm_before_fc:
            aux = self.input_norm(aux)
        if self.config.fc_norm:
            chunks = aux.chunk(len(self.aux_layer_ids), dim=-1)
            aux = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return self.fc(aux)

    def unroll(
        self,
        tokens: Tensor,
        aux: Tensor,
        lengths: Sequence[int],
        steps: int,
        next_tokens: NextTokens,
        share: ContextShare | None = None,
    ) -> Iterator[Tensor]:
        """Run `steps` chained steps from every row of a packed batch at once.

        Args:
            tokens: `[N]` int64, the token that follows each row.
            aux: `[N, K*H]` target features.
            lengths: rows of each packed sequence, summing to N; nothing attends across sequences.
            steps: number of steps, at least 1.
            next_tokens: what later steps embed.
            share: where ranks share the sequences, which rows these are; `lengths` are still those of all.

        Yields:
            Normed hidden states `[N, h]` of each step.
        """
        if share is None:
            positions = torch.cat([torch.arange(n, device=tokens.device) for n in lengths])
        else:
            positions = share.positions(tokens.device)
        hidden, weights = self.fuse(aux), [layer.weights() for layer in self.decoder_layers]
        known: list[list[Tensor]] = [[] for _ in weights]
        for step in range(steps):
            place = (share or lengths, tokens, positions + step, hidden)
            columns = [column for of_layer in known for column in of_layer]
            raw, normed, *more = self._recomputable(partial(self._step, weights))(*place, *columns)
            for of_layer, found in zip(known, _shares(more, len(known)), strict=True):
                of_layer.extend(found)
            yield normed
            if step + 1 < steps:
                tokens = next_tokens(step + 1, normed)
            hidden = normed if self.config.norm_output else raw

    def _step(
        self,
        weights: Sequence[Eagle3Weights],
        of: Sequence[int] | ContextShare,
        tokens: Tensor,
        positions: Tensor,
        hidden: Tensor,
        *known: Tensor,
    ) -> tuple[Tensor, ...]:
        """One step: its output, raw and normed `[N, h]`, and each layer's keys and values.

        `known` are those of the steps before, layer after layer. Where ranks share the sequences, the first step's keys
        and values of all ranks come before those of its own.
        """
        new: list[Tensor] = []
        for layer, columns in enumerate(_shares(known, len(weights))):
            project = self._recomputable(partial(self.project, layer, weights[layer]))
            q, k, v = _by_rows(self.recompute, project, tokens, positions, hidden)
            more = (*of.gather(k, v), k, v) if isinstance(of, ContextShare) and not columns else (k, v)
            attended = _attend(q, [*columns, *more], of, self.config.windows[layer])
            finish = self._recomputable(partial(self._finish, layer, weights[layer]))
            hidden, *normed = _by_rows(self.recompute, finish, hidden, attended)
            new += more
        return hidden, *normed, *new

    def project(
        self, layer: int, weights: Eagle3Weights, tokens: Tensor, positions: Tensor, hidden: Tensor
    ) -> tuple[Tensor, ...]:
        """Queries, keys and values of a layer's rows `[n]`; see `Eagle3Layer.project`."""
        tables = rotary_tables(positions, self.config)
        return self.decoder_layers[layer].project(self.embed_tokens.weight, tokens, hidden, tables, weights)

    def _finish(self, layer: int, weights: Eagle3Weights, hidden: Tensor, attended: Tensor) -> tuple[Tensor, ...]:
        """A layer's output; of the last one normed, too."""
        raw = self.decoder_layers[layer].finish(hidden, attended, weights)
        return (raw, self.norm(raw)) if layer + 1 == len(self.layers) else (raw,)

    def _recomputable(self, function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
        if not self.recompute or not torch.is_grad_enabled():
            return function
        return partial(checkpoint, function, use_reentrant=False, preserve_rng_state=False)

    def loss(self, batch: PackedSamples, target: TargetProjection, total: int, chunk_tokens: int) -> DraftLoss:
        """Divergence from the target over the training-time test, step by step (see Draft.loss)."""
        config, count, first = self.config, len(batch.tokens), batch.tokens[:1]

        # Rows whose text ends before a step's token run on padding; their weight is 0.
        padded = torch.cat([batch.tokens, first.expand(config.ttt_steps)])
        (padded,) = to_device([padded], batch.aux.device)
        rows = None if batch.share is None else batch.share.packed_rows(padded.device)

        def text(step: int, _normed: Tensor | None = None) -> Tensor:
            return padded[1 + step : 1 + step + count] if rows is None else padded[1 + step + rows]

        outputs = self.unroll(text(0), batch.aux, batch.lengths, config.ttt_steps, text, batch.share)
        return chain_loss(self, outputs, batch, target, total, chunk_tokens)

    @torch.no_grad()
    def rollout(self, tokens: Tensor, aux: Tensor, lookahead: int) -> Tensor:
        """Proposals `[T, lookahead]` from every position of one sequence (see ProposalSource)."""
        proposals: list[Tensor] = []
        for normed in self.unroll(tokens[1:], aux, [len(aux)], lookahead, lambda _step, _normed: proposals[-1]):
            proposals.append(self.target_ids[self.logits(normed).argmax(-1)])
        return torch.stack(proposals, dim=1)

    def logits_along(self, texts: PackedTexts, lookahead: int, rows: Tensor) -> Iterator[Tensor]:
        """See `Draft.logits_along`; rows whose text ends before a step's token run on other tokens, to no effect."""
        text, lengths = F.pad(texts.following, (0, lookahead)), texts.lengths
        count = len(texts.following)
        outputs = self.unroll(text[:count], texts.aux, lengths, lookahead, lambda step, _: text[step : step + count])
        return (self.logits(normed[rows]) for normed in outputs)

    def ranks_along(self, texts: PackedTexts, rows: Tensor, topk: int, depth: int) -> Tensor:
        """See `BranchingSource.ranks_along`."""
        return ranks_along(self, texts, rows, topk, depth)

    def logits(self, normed: Tensor) -> Tensor:
        """`[N, Vd]` over the draft vocabulary from normed hidden states `[N, H]`."""
        return F.linear(normed, self.lm_head.weight)

    def proposers(self, count: int) -> Eagle3Proposer:
        return Eagle3Proposer(self, count)


def _as_wide(table: Tensor, size: int) -> Tensor:
    """The table `[rows, H]` itself, or its first columns, zero-padded, as `[rows, size]`."""
    return table if table.shape[1] == size else F.pad(table[:, :size], (0, max(0, size - table.shape[1])))


def _shares(flat: Sequence[Tensor], count: int) -> list[list[Tensor]]:
    """`count` equal parts of a list."""
    size = len(flat) // count
    return [list(flat[start : start + size]) for start in range(0, size * count, size)] if size else [[]] * count


def _by_rows(parted: bool, function: Callable[..., tuple[Tensor, ...]], *rows: Tensor) -> list[Tensor]:
    """The function's tensors of all rows; `parted`: of `RECOMPUTED_ROWS` rows at a time."""
    if not parted:
        return list(function(*rows))
    parts = zip(*(x.split(RECOMPUTED_ROWS) for x in rows), strict=True)
    columns = list(zip(*(function(*part) for part in parts), strict=True))
    return [column[0] if len(column) == 1 else torch.cat(column) for column in columns]


def _attend(q: Tensor, columns: Sequence[Tensor], of: Sequence[int] | ContextShare, window: int | None) -> Tensor:
    """`[N, heads * d]` what a step's rows attend to; `columns` as in `Eagle3Draft._step`, keys and values by turns."""
    pairs = list(zip(columns[::2], columns[1::2], strict=True))
    if not isinstance(of, ContextShare):
        return step_attention(q, pairs, of, window=window)
    before = tuple(slice(run.offset, run.packed.start) for run in of.runs)
    lengths, earlier = [run.rows for run in of.runs], Earlier(*pairs.pop(0), before)
    return step_attention(q, pairs, lengths, earlier=earlier, window=window)


DRAFT = Eagle3Draft
