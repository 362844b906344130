"""EAGLE-3 (arXiv 2503.01840): one decoder layer over the next token's embedding and the fused target features.

Row i of a sequence takes the target's features of position i and the embedding of token i+1, and predicts token i+2.
In step j of the training-time test (and of a chain while decoding) it takes its own output of step j-1 and the
embedding of token i+1+j, and predicts token i+2+j. Parameter names are those of SGLang's `LlamaForCausalLMEagle3`
(0.5.23) and of speculators' `Eagle3DraftModel` (0.9.0): `fc`, `fc_norm.*` or `input_norm`, `layers.0.*`, `norm`,
`lm_head`, `embed_tokens`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.config.eagle3 import Eagle3Config
from models.drafts.base import Draft, DraftLoss, PackedSamples, TargetProjection
from models.drafts.chains import chain_loss
from models.drafts.context import ContextShare
from models.drafts.eagle3.attention import Earlier, step_attention
from models.drafts.eagle3.proposer import Eagle3Proposer
from models.drafts.layers import GatedMLP, GatedWeights, RMSNorm, TargetTable, rotary_tables
from models.drafts.products import SharedWeight, added_product, products
from models.drafts.row_functions import Tables, compute_dtype, embedded_input, rotate
from models.drafts.transfer import to_device
from models.drafts.vocabulary import DraftVocabulary

RECOMPUTED_ROWS = 8192
"""Rows whose inner activations are alive at once where the layer is computed again."""

NextTokens = Callable[[int, Tensor], Tensor]
"""(step j >= 1, normed hidden states of step j-1 `[N, H]`) -> tokens `[N]` that step j embeds."""


class Eagle3Attention(nn.Module):
    """Grouped-query attention over `cat(embedding, hidden)`."""

    def __init__(self, config: Eagle3Config, hidden_size: int):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.q_proj = nn.Linear(2 * hidden_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(2 * hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(2 * hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, hidden_size, bias=False)


class Eagle3Weights(NamedTuple):
    """The layer's weights for one pass, in which it runs once per step."""

    q: SharedWeight
    k: SharedWeight
    v: SharedWeight
    o: SharedWeight
    mlp: GatedWeights


class Eagle3Layer(nn.Module):
    """The draft's one layer."""

    def __init__(self, config: Eagle3Config, hidden_size: int):
        super().__init__()
        self.input_layernorm = RMSNorm(hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(hidden_size, config.rms_norm_eps)
        self.self_attn = Eagle3Attention(config, hidden_size)
        self.post_attention_layernorm = RMSNorm(hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(hidden_size, config.intermediate_size)

    def weights(self) -> Eagle3Weights:
        """For one pass."""
        own = self.self_attn
        q, k, v, o = (SharedWeight(x.weight) for x in (own.q_proj, own.k_proj, own.v_proj, own.o_proj))
        return Eagle3Weights(q, k, v, o, self.mlp.weights())

    def attention_input(self, table: Tensor, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Normed embeddings of `tokens` `[N]` by `table` `[V, H]` beside normed `hidden` `[N, H]`: `[N, 2H]`."""
        weights = self.input_layernorm.weight, self.hidden_norm.weight
        return embedded_input(table, tokens, hidden, weights, self.hidden_norm.eps)

    def project(self, x: Tensor, tables: Tables, weights: Eagle3Weights) -> tuple[Tensor, Tensor, Tensor]:
        """`[N, 2H]` to rotated queries `[N, heads, d]`, rotated keys and values `[N, kv_heads, d]`."""
        q, k, v = (found.unflatten(1, (-1, self.self_attn.head_dim)) for found in products(x, weights[:3]))
        return rotate(q, tables), rotate(k, tables), v

    def finish(self, residual: Tensor, attended: Tensor, weights: Eagle3Weights) -> Tensor:
        hidden = added_product(residual, attended, weights.o)
        return weights.mlp.add_to(hidden, self.post_attention_layernorm(hidden))


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
        hidden_size = embedding.shape[1]
        self.config, self.vocabulary, self.aux_layer_ids = config, vocabulary, tuple(aux_layer_ids)
        aux_count = len(self.aux_layer_ids)
        self.fc = nn.Linear(aux_count * hidden_size, hidden_size, bias=False)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(hidden_size, config.rms_norm_eps) for _ in range(aux_count))
        if config.norm_before_fc:
            self.input_norm = RMSNorm(aux_count * hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList([Eagle3Layer(config, hidden_size)])
        self.norm = RMSNorm(hidden_size, config.rms_norm_eps)
        # SGLang takes a head that is not stored from the target, whole.
        stored = not (config.shared_head and vocabulary.whole)
        head = nn.Linear(hidden_size, len(vocabulary), bias=False).weight
        self.lm_head = TargetTable(head, trained=not config.shared_head, stored=stored)
        self.embed_tokens = TargetTable(embedding, trained=config.train_embeddings, stored=config.train_embeddings)
        self.register_buffer("target_ids", vocabulary.target_ids.clone(), persistent=False)

    @property
    def midlayer(self) -> Eagle3Layer:
        """The one layer."""
        return self.layers[0]  # type: ignore[return-value]

    @property
    def positions(self) -> int:
        return self.config.ttt_steps

    def hold_embeddings(self, dtype: torch.dtype) -> None:
        if not self.config.train_embeddings:
            self.embed_tokens.weight = self.embed_tokens.weight.to(dtype)

    def start_from(self, head: Tensor) -> None:
        """The draft head starts as the target head's rows of the draft vocabulary; a shared one stays so."""
        self.lm_head.start_as(head if self.vocabulary.whole else head[self.target_ids])

    def engine_config(self) -> dict[str, Any] | None:
        """For SGLang's `LlamaForCausalLMEagle3`.

        None with embeddings of the draft's own, in whose place SGLang puts the target's, and with one target layer:
        features as wide as an embedding are taken for the draft's own output, so they are neither normed nor fused.
        """
        config, whole = self.config, self.vocabulary.whole
        if config.train_embeddings or len(self.aux_layer_ids) == 1:
            return None
        return {
            **self._layer_config(),
            "architectures": ["LlamaForCausalLMEagle3"],
            "target_hidden_size": self.norm.weight.shape[0],
            "draft_vocab_size": None if config.shared_head and whole else len(self.vocabulary),
            **self._norms(),
            "num_aux_hidden_states": len(self.aux_layer_ids),
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": list(self.aux_layer_ids),
            },
        }

    def speculators_config(self) -> dict[str, Any] | None:
        """For speculators' `Eagle3DraftModel`, which calls the output of the target's layer l by the number l + 1.

        None with the target's whole head for the draft's: SGLang's way to say so contradicts theirs.
        """
        if self.config.shared_head and self.vocabulary.whole:
            return None
        return {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "transformer_layer_config": self._layer_config(),
            "draft_vocab_size": len(self.vocabulary),
            "target_hidden_size": self.norm.weight.shape[0],
            "eagle_aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in self.aux_layer_ids],
            "norm_before_residual": False,
            **self._norms(),
            "embed_requires_grad": self.config.train_embeddings,
        }

    def _norms(self) -> dict[str, bool]:
        return {name: getattr(self.config, name) for name in ("fc_norm", "norm_before_fc", "norm_output")}

    def _layer_config(self) -> dict[str, Any]:
        """Hugging Face's `LlamaConfig`."""
        layers = self.config.engine_layers(self.norm.weight.shape[0], self.vocabulary.target_size, 1)
        return {"model_type": "llama", "mlp_bias": False} | layers

    def fuse(self, aux: Tensor) -> Tensor:
        """Target features `[N, K*H]` to the draft's input `[N, H]`."""
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
            Normed hidden states `[N, H]` of each step.
        """
        if share is None:
            positions = torch.cat([torch.arange(n, device=tokens.device) for n in lengths])
        else:
            positions = share.positions(tokens.device)
        hidden, known, weights = self.fuse(aux), [], self.midlayer.weights()
        for step in range(steps):
            place = (share or lengths, tokens, positions + step, hidden)
            raw, normed, *more = self._recomputable(partial(self._step, weights))(*place, *known)
            known += more
            yield normed
            if step + 1 < steps:
                tokens = next_tokens(step + 1, normed)
            hidden = normed if self.config.norm_output else raw

    def _step(
        self,
        weights: Eagle3Weights,
        of: Sequence[int] | ContextShare,
        tokens: Tensor,
        positions: Tensor,
        hidden: Tensor,
        *known: Tensor,
    ) -> tuple[Tensor, ...]:
        """One step: its output, raw and normed `[N, H]`, its keys and its values; `known` are those of steps before.

        Where ranks share the sequences, the first step's keys and values of all ranks come before those of its own.
        """
        rows = len(tokens) if not self.recompute else RECOMPUTED_ROWS
        parts = zip(tokens.split(rows), positions.split(rows), hidden.split(rows), strict=True)
        q, k, v = _joined(self._recomputable(partial(self.project, weights))(*part) for part in parts)
        more = (*of.gather(k, v), k, v) if isinstance(of, ContextShare) and not known else (k, v)
        columns = [*known, *more]
        pairs = list(zip(columns[::2], columns[1::2], strict=True))
        if isinstance(of, ContextShare):
            before = tuple(slice(run.offset, run.packed.start) for run in of.runs)
            lengths, earlier = [run.rows for run in of.runs], Earlier(*pairs.pop(0), before)
            attended = step_attention(q, pairs, lengths, earlier=earlier)
        else:
            attended = step_attention(q, pairs, of)
        parts = zip(hidden.split(rows), attended.split(rows), strict=True)
        raw, normed = _joined(self._recomputable(partial(self._finish, weights))(*part) for part in parts)
        return raw, normed, *more

    def project(self, weights: Eagle3Weights, tokens: Tensor, positions: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values of rows `[n]` from `tokens` and previous outputs `hidden` `[n, H]`."""
        tables = rotary_tables(positions, self.config.head_dim, self.config.rope_theta)
        x = self.midlayer.attention_input(self.embed_tokens.weight, tokens, hidden)
        return self.midlayer.project(x, tables, weights)

    def _finish(self, weights: Eagle3Weights, hidden: Tensor, attended: Tensor) -> tuple[Tensor, ...]:
        raw = self.midlayer.finish(hidden, attended, weights)
        return raw, self.norm(raw)

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

    def logits(self, normed: Tensor) -> Tensor:
        """`[N, Vd]` over the draft vocabulary from normed hidden states `[N, H]`."""
        return F.linear(normed, self.lm_head.weight)

    def proposers(self, count: int) -> Eagle3Proposer:
        return Eagle3Proposer(self, count)


def _joined(parts: Iterable[tuple[Tensor, ...]]) -> list[Tensor]:
    """Each tensor of all the parts, row after row."""
    columns = list(zip(*parts, strict=True))
    return [column[0] if len(column) == 1 else torch.cat(column) for column in columns]


DRAFT = Eagle3Draft
