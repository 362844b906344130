"""MTP: the target's own next-n layer (DeepSeek-V3, arXiv 2412.19437, section 2.2), trained further on other text.

Row i of a sequence takes the target's last hidden state of position i, after the final norm, and the embedding of token
i+1, and predicts token i+2:

    u = W [norm_e(E[x_{i+1}]) ; norm_h(f_i)]  ->  decoder layer  ->  final norm  ->  the target's head

In step j it takes its own output of step j-1, after the final norm, and the embedding of token i+1+j. By default it is
trained along such chains, as EAGLE-3 drafts are; by FastMTP's objective (arXiv 2509.18362) a step's rows see each other
and stay at their positions. Embeddings and head are the target's.
"""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from models.config.mtp import MtpConfig
from models.drafts.eagle3.unrolled import Pass, UnrolledDraft
from models.drafts.layers import TargetTable
from models.drafts.mtp.layers import MtpLayer, MtpWeights, norm_of
from models.drafts.mtp.names import stored_tensors
from models.drafts.products import SharedWeight, products
from models.drafts.row_functions import compute_dtype, embedded_input
from models.drafts.vocabulary import DraftVocabulary


class MtpDraft(UnrolledDraft):
    """The MTP layer of one target (arguments as for every draft)."""

    config: MtpConfig

    def __init__(self, config: MtpConfig, embedding: Tensor, vocabulary: DraftVocabulary, aux_layer_ids: Sequence[int]):
        super().__init__(config, vocabulary, aux_layer_ids)
        self.hidden_size = hidden_size = embedding.shape[1]
        self.fc = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.embedding_norm, self.hidden_norm = (norm_of(config, hidden_size) for _ in range(2))
        self.layers = nn.ModuleList([MtpLayer(config, hidden_size)])
        self.norm = norm_of(config, hidden_size)
        head = torch.empty(len(vocabulary), hidden_size)
        self.lm_head = TargetTable(head, trained=False, stored=False)
        self.embed_tokens = TargetTable(embedding, trained=False, stored=False)

    @property
    def trains_chains(self) -> bool:
        return self.config.objective == "training_time_test"

    @property
    def learns_own_tokens(self) -> bool:
        return self.config.objective == "fastmtp"

    def target_tensors(self, held: Collection[str] = ()) -> dict[str, Tensor]:
        parts = (stored_tensors(self.config, *named, held) for named in self.state_dict().items())
        return dict(pair for tensors in parts for pair in tensors)

    def hold_embeddings(self, dtype: torch.dtype) -> None:
        self.embed_tokens.weight = self.embed_tokens.weight.to(dtype)

    def start_from(self, head: Tensor) -> None:
        """The head is the target's; the layer's own weights come from the target's checkpoint (`target_tensors`)."""
        self.lm_head.start_as(head)

    def engine_config(self) -> dict[str, Any]:
        """Beside the target's `config.json`, by which engines read an MTP layer.

        MiMo's own model type is known to its remote code alone, and its settings are Qwen2's.
        """
        return {"model_type": "qwen2"} if self.config.family == "mimo" else {}

    def weights(self) -> list[MtpWeights]:
        """See `UnrolledDraft.weights`."""
        (layer,) = self.layers
        assert isinstance(layer, MtpLayer)
        fc = self.fc.weight
        if self.config.family == "mimo":
            fc = torch.cat(fc.chunk(2, dim=1)[::-1], dim=1)  # its columns of the hidden state come first
        return [layer.weights(SharedWeight(fc))]

    def fuse(self, aux: Tensor) -> Tensor:
        """The first step's hidden states are the target's: `[N, H]`, the last H of `[N, K*H]`."""
        return aux[..., -self.hidden_size :].to(compute_dtype(self.fc.weight))

    def enter(self, one: Pass, tokens: Tensor, positions: Tensor, hidden: Tensor) -> Tensor:
        """`u` `[n, H]`. MiMo's layer sees no embedding at position 0."""
        factors = self.embedding_norm.factors, self.hidden_norm.factors
        both = embedded_input(one.embeddings, tokens, hidden, factors, self.config.rms_norm_eps)
        if self.config.family == "mimo":
            first = torch.arange(2 * self.hidden_size, device=both.device) < self.hidden_size
            both = both.masked_fill((positions == 0).unsqueeze(1) & first, 0.0)
        return products(both, (one.weights[0].fc,))[0]


DRAFT = MtpDraft
