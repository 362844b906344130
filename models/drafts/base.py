"""What every draft method offers: a training loss, proposals while decoding, and a rollout from every position."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from models.drafts.batched_proposer import Along, DrawingSource, PackedTexts, Proposer
from models.drafts.context import ContextShare
from models.drafts.sampling import Sampling
from models.drafts.vocabulary import DraftVocabulary
from models.losses.chunked import TargetDistribution


@dataclass(frozen=True)
class PackedSamples:
    """Captured samples, concatenated without padding. N is the sum of `lengths`.

    What decides which positions are trained is on the host: planning a micro-batch there costs no wait for a GPU.
    """

    tokens: Tensor
    """`[N]` int64, on the host."""
    loss_mask: Tensor
    """`[N]` bool, on the host: the token is one that the target would generate."""
    aux: Tensor
    """`[N, K*H]` target features; with a `share`, of its rows alone."""
    last: Tensor
    """`[N, H]` target hidden states after the final norm; with a `share`, of its states alone."""
    lengths: tuple[int, ...]
    top: Tensor | None = None
    """`[N]` int32, on the host: the target's own next tokens, if these decide which positions count
    (`training.out_of_vocabulary=argmax`); with a `share`, of its states alone. None: the text's token decides."""
    share: ContextShare | None = None
    """Which rows are computed here, where ranks share samples. None: all."""
    embedded: Tensor | None = None
    """`[N, H]` what the target's first layer read; with a `share`, of its states alone. None: there are no images, or
    the draft reads no embeddings."""
    shown: Tensor | None = None
    """`[N]` bool, on the host: the token stands for a part of an image. None where `embedded` is."""
    places: Tensor | None = None
    """`[N, 3]` int32, positions in time, height and width; with a `share`, of its rows alone. None where `embedded`
    is."""


@dataclass(frozen=True)
class TargetProjection:
    """The part of the target's head that training needs."""

    rows: Tensor
    """`[Vd, H]` the head's rows of the draft vocabulary."""
    full: Tensor | None
    """`[V, H]` the whole head, if the loss asks for the draft vocabulary's share of the target's probability. None:
    the target's distribution over the draft vocabulary is taken for the whole."""
    logit_scale: float
    soft_cap: float | None

    def distribution(self, last: Tensor, whole_vocabulary: bool, draft_ids: Tensor) -> TargetDistribution:
        """The target's distribution at states `[P, H]`; from the whole head if the loss needs the draft vocabulary's
        share of it."""
        if whole_vocabulary or self.full is None:
            return TargetDistribution(last, self.rows, self.logit_scale, self.soft_cap)
        return TargetDistribution(last, self.full, self.logit_scale, self.soft_cap, draft_ids)


class DraftLoss(NamedTuple):
    """A micro-batch's share of an optimizer step's loss, and its counts. S is the number of proposed positions."""

    loss: Tensor
    """Scalar: sum over supervised positions / the step's total of supervised positions."""
    accepted: Tensor
    """`[S]` positions at which proposals 1..s all equal the target's greatest."""
    tried: Tensor
    """`[S]` positions at which proposals 1..s-1 were all accepted."""
    supervised: int
    """Supervised positions."""
    covered: int
    """Those of them that the draft vocabulary can express."""


class Draft(torch.nn.Module):
    """A draft model. Subclasses are `models/drafts/<method>/module.py`.

    Parameters have the names that SGLang and speculators give them, where they have the method: the export stores them
    as they are.
    """

    config: Any
    target_ids: Tensor
    """The vocabulary's."""

    token_tables: Collection[str] = ("lm_head.weight", "embed_tokens.weight")
    """Names of parameters that have a row for each token, if it has them: Muon leaves these to AdamW."""
    trained_share: float = 0.0
    """Share of the training steps done so far; training sets it, for losses with a schedule."""
    epoch: int = 0
    """Passes over the samples before this one; training sets it, for losses of drawn positions."""
    recompute: bool = False
    """Training keeps what passes from step to step and computes the rest again in the backward pass: less memory, more
    arithmetic. Methods without such steps have nothing to compute again."""

    def __init__(self, config: Any, vocabulary: DraftVocabulary, aux_layer_ids: Sequence[int]):
        super().__init__()
        self.config, self.vocabulary, self.aux_layer_ids = config, vocabulary, tuple(aux_layer_ids)
        self.register_buffer("target_ids", vocabulary.target_ids.clone(), persistent=False)

    @property
    def positions(self) -> int:
        """S: proposed positions that training counts."""
        raise NotImplementedError

    @property
    def loss_logits(self) -> int:
        """Draft logits of one position of the loss."""
        return self.positions * len(self.vocabulary)

    def target_tensors(self, held: Collection[str] = ()) -> dict[str, Tensor]:
        """The draft's weights by the names of the target's checkpoint, as views: training starts from the tensors
        there, and an export stores them so, with the target's `config.json`. Empty for drafts that a target does not
        come with.

        `held` are names that the checkpoint has, which decide where a family has two layouts.
        """
        return {}

    def hold_embeddings(self, dtype: torch.dtype) -> None:
        """Keep the target's embeddings, where they are frozen, in `dtype`: they are only read, row by row."""

    def start_from(self, head: Tensor) -> None:
        """Take what an untrained draft can from the target's head `[V, H]`, and what no draft of the method stores.

        Comes before stored weights are loaded.
        """
        raise NotImplementedError

    def engine_obstacles(self) -> list[str]:
        """What SGLang would run differently of a draft whose method it serves, by the names of settings."""
        return []

    def engine_config(self) -> dict[str, Any] | None:
        """This draft in SGLang's `config.json`; None if SGLang does not serve it."""
        return None

    def engine_copies(self) -> dict[str, Tensor]:
        """Parameters that an engine calls by another name: an export holds them under both."""
        return {}

    def speculators_config(self) -> dict[str, Any] | None:
        """What `config.json` says of this draft to vLLM and the package `speculators`, beside `engine_config`.

        A key that both have means the same in both, but for `architectures`. None where they have no such draft.
        """
        return None

    def loss(self, batch: PackedSamples, target: TargetProjection, total: int, chunk_tokens: int) -> DraftLoss:
        """Training loss of one micro-batch.

        Args:
            batch: captured samples.
            target: the target's head.
            total: supervised positions of the whole optimizer step, over all ranks and micro-batches.
            chunk_tokens: positions whose logits may be alive at once.
        """
        raise NotImplementedError

    def no_loss(self) -> Tensor:
        """The loss of a rank that has no sample: 0, and every parameter has a part in it, as gradients are reduced."""
        return torch.stack([parameter.sum() * 0.0 for parameter in self.parameters()]).sum()

    def proposers(self, count: int) -> Proposer:
        raise NotImplementedError

    def rollout(self, tokens: Tensor, aux: Tensor, lookahead: int, first: int = 0) -> Tensor:
        raise NotImplementedError

    def after_images(self, embedded: Tensor, places: Tensor, shown: Tensor) -> DrawingSource:
        """This draft for one text that holds images.

        Args:
            embedded: `[T, H]` what the target's first layer read of all tokens but the last.
            places: `[T, 3]` int32, where these stand.
            shown: `[T + 1]` bool: the token stands for a part of an image.
        """
        return self

    def logits_along(self, texts: PackedTexts, lookahead: int, rows: Tensor) -> Iterator[Tensor]:
        """Logits `[n, Vd]` of each token that is proposed, at most `lookahead` of them; see `DrawingSource.along`."""
        raise NotImplementedError

    @torch.no_grad()
    def along(self, texts: PackedTexts, lookahead: int, rows: Tensor, sampling: Sampling) -> Along:
        """See `DrawingSource.along`."""
        ids, left = self.vocabulary.target_ids.to(rows.device), texts.places[1][rows]
        text = F.pad(texts.following, (0, lookahead))
        chances = torch.zeros(len(rows), lookahead, device=rows.device)
        likeliest = torch.zeros_like(chances, dtype=torch.bool)
        for step, logits in enumerate(self.logits_along(texts, lookahead, rows) if len(rows) else ()):
            own = text[rows + 1 + step]
            place = torch.searchsorted(ids, own).clamp(max=len(ids) - 1)
            known = (ids[place] == own) & (step < left)
            drawn = sampling.drafted(logits).gather(-1, place.unsqueeze(-1)).squeeze(-1)
            chances[:, step] = drawn * known
            likeliest[:, step] = known & (logits.argmax(-1) == place)
        return Along(chances, likeliest)


def supervised_positions(loss_mask: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Packed positions `[P]` whose next token is supervised and can be predicted by a draft.

    Position t of a sample is one when t >= 1 (a draft predicts it from position t - 1) and token t + 1 is supervised.
    """
    keep = torch.zeros(len(loss_mask), dtype=torch.bool, device=loss_mask.device)
    start = 0
    for length in lengths:
        end = start + length
        keep[start + 1 : end - 1] = loss_mask[start + 2 : end]
        start = end
    return keep.nonzero().squeeze(-1)
