"""Drafts of decoder layers that read their own output step after step: in a chain, and in the training-time test.

A subclass says what the first step reads (`fuse`), and what enters the layers of every step (`enter`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.drafts.base import Draft, DraftLoss, PackedSamples, TargetProjection
from models.drafts.batched_proposer import Along, DrawingSource, ImageRows, PackedTexts, Proposer
from models.drafts.chains import chain_loss
from models.drafts.context import ContextShare
from models.drafts.eagle3.attention import Earlier, step_attention
from models.drafts.eagle3.branches import ranks_along
from models.drafts.eagle3.proposer import Eagle3Proposer
from models.drafts.layers import TargetTable
from models.drafts.rope import pair_positions, rotary_tables
from models.drafts.row_functions import Embeddings, Tables
from models.drafts.sampling import Sampling
from models.drafts.transfer import to_device

RECOMPUTED_ROWS = 8192
"""Rows whose inner activations are alive at once where the layer is computed again."""

NextTokens = Callable[[int, Tensor], Tensor]
"""(step j >= 1, normed hidden states of step j-1 `[N, H]`) -> tokens `[N]` that step j embeds."""


class Pass(NamedTuple):
    """What the layers read in one pass, in which each runs once per step."""

    weights: Sequence[Any]
    """Each layer's."""
    embeddings: Embeddings


class UnrolledLayer(Protocol):
    """A decoder layer, cut where its rows attend; see `Eagle3Layer`. Each kind has its own weights for one pass."""

    def weights(self) -> Any: ...

    def project(
        self, embeddings: Embeddings, tokens: Tensor, hidden: Tensor, tables: Tables, weights: Any
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def finish(self, hidden: Tensor, attended: Tensor, weights: Any) -> Tensor: ...


class UnrolledDraft(Draft):
    """The part that EAGLE-3 and MTP share."""

    layers: nn.ModuleList
    norm: Any
    lm_head: TargetTable
    embed_tokens: TargetTable

    @property
    def decoder_layers(self) -> Sequence[UnrolledLayer]:
        """`layers`, by their type."""
        return list(self.layers)  # type: ignore[arg-type]

    def weights(self) -> Sequence[Any]:
        """Each layer's weights for one pass."""
        return [layer.weights() for layer in self.decoder_layers]

    def begin(self, shown: Tensor | None = None) -> Pass:
        """A pass; `shown` `[M, H]` are embeddings of images (see `Embeddings`)."""
        return Pass(self.weights(), Embeddings(self.embed_tokens.weight, shown))

    def numbered(self, tokens: Tensor, shown: Tensor, places: Tensor) -> Tensor:
        """`tokens` `[N]` as rows embed them: where `shown` `[N]` bool, the row of images that `places` `[N]` names."""
        return torch.where(shown, len(self.embed_tokens.weight) + places, tokens)

    @property
    def positions(self) -> int:
        return self.config.ttt_steps

    @property
    def trains_chains(self) -> bool:
        """Whether steps are chained in training, too (see `unroll`)."""
        return True

    @property
    def learns_own_tokens(self) -> bool:
        """Whether the loss is the cross-entropy of the text's own tokens (see `chain_loss`)."""
        return False

    def fuse(self, aux: Tensor) -> Tensor:
        """Target features `[N, K*H]` to the first step's hidden states `[N, h]`."""
        raise NotImplementedError

    def unroll(
        self,
        tokens: Tensor,
        aux: Tensor,
        lengths: Sequence[int],
        steps: int,
        next_tokens: NextTokens,
        share: ContextShare | None = None,
        *,
        chained: bool = True,
        images: ImageRows | None = None,
    ) -> Iterator[Tensor]:
        """Run `steps` steps from every row of a packed batch at once.

        Args:
            tokens: `[N]` int64, the token that follows each row.
            aux: `[N, K*H]` target features.
            lengths: rows of each packed sequence, summing to N; nothing attends across sequences.
            steps: number of steps, at least 1.
            next_tokens: what later steps embed.
            share: where ranks share the sequences, which rows these are; `lengths` are still those of all.
            chained: a row of step j stands at position i + j and sees the first step's rows and its own later ones, as
                while decoding. Otherwise it stays at position i and sees the rows of its own step.
            images: of texts with images, whose tokens are `numbered`.

        Yields:
            Normed hidden states `[N, h]` of each step.
        """
        axes = self.config.axes
        if images is not None and axes is not None:
            positions = pair_positions(images.places, axes)
        elif share is None:
            positions = torch.cat([torch.arange(n, device=tokens.device) for n in lengths])
        else:
            positions = share.positions(tokens.device)
        hidden, one = self.fuse(aux), self.begin(None if images is None else images.embedded)
        known: list[list[Tensor]] = [[] for _ in one.weights]
        for step in range(steps):
            place = (share or lengths, tokens, positions + step if chained else positions, hidden)
            columns = [column for of_layer in known for column in of_layer] if chained else []
            raw, normed, *more = self._recomputable(partial(self._step, one))(*place, *columns)
            for of_layer, found in zip(known, _shares(more, len(known)), strict=True):
                of_layer.extend(found)
            yield normed
            if step + 1 < steps:
                tokens = next_tokens(step + 1, normed)
            hidden = normed if self.config.norm_output else raw

    def _step(
        self,
        one: Pass,
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
        hidden = self.enter(one, tokens, positions, hidden)
        for layer, columns in enumerate(_shares(known, len(one.weights))):
            project = self._recomputable(partial(self.project, one, layer))
            q, k, v = _by_rows(self.recompute, project, tokens, positions, hidden)
            more = (*of.gather(k, v), k, v) if isinstance(of, ContextShare) and not columns else (k, v)
            attended = _attend(q, [*columns, *more], of, self.config.windows[layer])
            finish = self._recomputable(partial(self._finish, layer, one.weights[layer]))
            hidden, *normed = _by_rows(self.recompute, finish, hidden, attended)
            new += more
        return hidden, *normed, *new

    def enter(self, one: Pass, tokens: Tensor, positions: Tensor, hidden: Tensor) -> Tensor:
        """What enters the first layer of rows `[n]`, `[n, h]`, from the previous step's hidden states `[n, h]`."""
        return hidden

    def project(self, one: Pass, layer: int, tokens: Tensor, positions: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values of a layer's rows `[n]`; see `Eagle3Layer.project`."""
        tables = rotary_tables(positions, self.config)
        return self.decoder_layers[layer].project(one.embeddings, tokens, hidden, tables, one.weights[layer])

    def _finish(self, layer: int, weights: Any, hidden: Tensor, attended: Tensor) -> tuple[Tensor, ...]:
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

        images, tokens = _images(batch), batch.tokens
        if images is not None:
            tokens = self._with_images(batch)
        # Rows whose text ends before a step's token run on padding; their weight is 0.
        padded = torch.cat([tokens, first.expand(config.ttt_steps)])
        (padded,) = to_device([padded], batch.aux.device)
        rows = None if batch.share is None else batch.share.packed_rows(padded.device)

        def text(step: int, _normed: Tensor | None = None) -> Tensor:
            return padded[1 + step : 1 + step + count] if rows is None else padded[1 + step + rows]

        shared, steps = batch.share, config.ttt_steps
        where = text(0), batch.aux, batch.lengths
        outputs = self.unroll(*where, steps, text, shared, chained=self.trains_chains, images=images)
        return chain_loss(self, outputs, batch, target, total, chunk_tokens, own_tokens=self.learns_own_tokens)

    def _with_images(self, batch: PackedSamples) -> Tensor:
        """`[N]` on the host: the batch's tokens, `numbered`."""
        assert batch.shown is not None
        places = torch.arange(len(batch.tokens))
        if batch.share is not None:
            # Parts of images that other ranks' rows embed may have any number.
            places = batch.share.state_index(places.device).clamp(min=0)
        return self.numbered(batch.tokens, batch.shown, places)

    @torch.no_grad()
    def rollout(
        self, tokens: Tensor, aux: Tensor, lookahead: int, first: int = 0, images: ImageRows | None = None
    ) -> Tensor:
        """Proposals `[T - first, lookahead]` from the positions of one sequence (see RolloutSource).

        `images`: as in `unroll`. Rows before `first` run on in later steps on other tokens, to no effect.
        """
        proposals: list[Tensor] = []

        def following(_step: int, _normed: Tensor) -> Tensor:
            return torch.cat([tokens[1 : first + 1], proposals[-1]])

        for normed in self.unroll(tokens[1:], aux, [len(aux)], lookahead, following, images=images):
            proposals.append(self.target_ids[self.logits(normed[first:]).argmax(-1)])
        return torch.stack(proposals, dim=1)

    def after_images(self, embedded: Tensor, places: Tensor, shown: Tensor) -> DrawingSource:
        """See `Draft.after_images`."""
        return _AfterImages(self, embedded, places, shown)

    def logits_along(self, texts: PackedTexts, lookahead: int, rows: Tensor) -> Iterator[Tensor]:
        """See `Draft.logits_along`; rows whose text ends before a step's token run on other tokens, to no effect."""
        text, lengths = F.pad(texts.following, (0, lookahead)), texts.lengths
        count = len(texts.following)

        def following(step: int, _normed: Tensor) -> Tensor:
            return text[step : step + count]

        outputs = self.unroll(text[:count], texts.aux, lengths, lookahead, following, images=texts.images)
        return (self.logits(normed[rows]) for normed in outputs)

    def ranks_along(self, texts: PackedTexts, rows: Tensor, topk: int, depth: int) -> Tensor:
        """See `BranchingSource.ranks_along`."""
        return ranks_along(self, texts, rows, topk, depth)

    def logits(self, normed: Tensor) -> Tensor:
        """`[N, Vd]` over the draft vocabulary from normed hidden states `[N, H]`."""
        return F.linear(normed, self.lm_head.weight)

    def proposers(self, count: int) -> Eagle3Proposer:
        return Eagle3Proposer(self, count)


@dataclass(frozen=True)
class _AfterImages:
    """See `Draft.after_images`."""

    draft: UnrolledDraft
    embedded: Tensor
    places: Tensor
    shown: Tensor

    def proposers(self, count: int) -> Proposer:
        raise AssertionError("texts with images are walked, not decoded")

    def rollout(self, tokens: Tensor, aux: Tensor, lookahead: int, first: int = 0) -> Tensor:
        """See `RolloutSource.rollout`."""
        images = ImageRows(self.embedded, self.places)
        return self.draft.rollout(self._numbered(tokens), aux, lookahead, first, images)

    def along(self, texts: PackedTexts, lookahead: int, rows: Tensor, sampling: Sampling) -> Along:
        """See `DrawingSource.along`, for this text alone."""
        assert len(texts.lengths) == 1
        following = self._numbered(F.pad(texts.following, (1, 0)))[1:]
        seen = replace(texts, following=following, images=ImageRows(self.embedded, self.places))
        return self.draft.along(seen, lookahead, rows, sampling)

    def _numbered(self, tokens: Tensor) -> Tensor:
        """`[T + 1]`."""
        return self.draft.numbered(tokens, self.shown, torch.arange(len(tokens), device=tokens.device))


def _images(batch: PackedSamples) -> ImageRows | None:
    if batch.embedded is None or not len(batch.embedded):
        # A rank that shares samples may hold no state: it then has no row that embeds anything of the text.
        return None
    assert batch.places is not None
    return ImageRows(batch.embedded, batch.places)


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
