"""EAGLE-3 (arXiv 2503.01840): decoder layers, usually one, over the next token's embedding and the target's features.

Row i of a sequence takes the target's features of position i and the embedding of token i+1, and predicts token i+2.
In step j of the training-time test (and of a chain while decoding) it takes its own output of step j-1 and the
embedding of token i+1+j, and predicts token i+2+j. Parameter names are those of SGLang's `LlamaForCausalLMEagle3`
(0.5.23) and of speculators' `Eagle3DraftModel` (0.9.0): `fc`, `fc_norm.*` or `input_norm`, `layers.0.*`, `norm`,
`lm_head`, `embed_tokens`. A row of step j stands at position i + j, in every layer.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.config.eagle3 import Eagle3Config
from models.drafts.eagle3.engines import sglang_config, sglang_obstacles, speculators_config
from models.drafts.eagle3.layers import Eagle3Layer
from models.drafts.eagle3.unrolled import UnrolledDraft
from models.drafts.layers import RMSNorm, TargetTable
from models.drafts.row_functions import compute_dtype
from models.drafts.vocabulary import DraftVocabulary


class Eagle3Draft(UnrolledDraft):
    """An EAGLE-3 draft for one target.

    Args:
        config: the method's knobs.
        embedding: `[V, H]` the target's raw token embeddings.
        vocabulary: which target tokens the draft proposes.
        aux_layer_ids: the K target layers whose outputs it reads.
    """

    def __init__(
        self, config: Eagle3Config, embedding: Tensor, vocabulary: DraftVocabulary, aux_layer_ids: Sequence[int]
    ):
        super().__init__(config, vocabulary, aux_layer_ids)
        self.target_hidden_size = embedding.shape[1]
        self.hidden_size = hidden_size = config.hidden_size or self.target_hidden_size
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

    @property
    def decoder_layers(self) -> list[Eagle3Layer]:
        """`layers`, by their type."""
        return list(self.layers)  # type: ignore[arg-type]

    @property
    def has_own_embeddings(self) -> bool:
        """Whether its embeddings are trained: by choice, or because the target's have another size."""
        return self.config.train_embeddings or self.hidden_size != self.target_hidden_size

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


def _as_wide(table: Tensor, size: int) -> Tensor:
    """The table `[rows, H]` itself, or its first columns, zero-padded, as `[rows, size]`."""
    return table if table.shape[1] == size else F.pad(table[:, :size], (0, max(0, size - table.shape[1])))


DRAFT = Eagle3Draft
