"""DFlash (arXiv 2602.06036): a block of masks after the last known token, filled in by one forward."""

from typing import Any

from torch import Tensor

from models.config.dflash import DFlashConfig
from models.drafts.blocks.module import BlockDraft, Scored, spread
from models.losses.position_weights import dpace_weights, token_probabilities


class DFlashDraft(BlockDraft):
    """A DFlash draft for one target; see `BlockDraft`."""

    config: DFlashConfig
    engine_class = "DFlashDraftModel"
    # SGLang reads a mask's row as its own position's token.
    unserved = ("sample_from_anchor",)

    def weights(self, scored: Scored, head: Tensor, chunk_tokens: int) -> Tensor:
        if self.config.position_weights == "decay":
            return super().weights(scored, head, chunk_tokens)
        labels = scored.labels
        chances = token_probabilities(scored.rows, head, labels.clamp(min=0), chunk_tokens) * (labels >= 0)
        return dpace_weights(spread(chances, scored.chosen, scored.there), scored.there, self.config.dpace_alpha)

    def engine_config(self) -> dict[str, Any] | None:
        """With a norm per target feature the class is Laguna's, whose gate on the attention's output DFlash has not."""
        settings = super().engine_config()
        laguna = {"architectures": ["DFlashLagunaForCausalLM"], "gating": False}
        return settings and settings | (laguna if self.config.fc_norm else {})

    def speculators_config(self) -> dict[str, Any] | None:
        """For speculators' `DFlashDraftModel`, which calls the output of the target's layer l by the number l + 1.

        None with a norm per target feature or the anchor first, which it does not have, and with layers of both types:
        vLLM (0.33.0, transformers_utils/configs/speculators/algos.py) takes `sliding_window_non_causal` for every
        layer's attention, where here full layers see the whole block and sliding ones, unless they see ahead, its
        earlier positions.
        """
        config = self.config
        non_causal = "sliding_attention" not in config.layer_types or config.sliding_sees_ahead
        if config.fc_norm or config.sample_from_anchor or (len(set(config.layer_types)) > 1 and not non_causal):
            return None
        return {
            "architectures": ["DFlashSpeculator"],
            "speculators_model_type": "dflash",
            "transformer_layer_config": self.layer_config(),
            "draft_vocab_size": len(self.vocabulary),
            "target_hidden_size": self.embedding.shape[1],
            "block_size": config.block_size,
            "aux_hidden_state_layer_ids": [layer_id + 1 for layer_id in self.aux_layer_ids],
            "mask_token_id": self.mask_token_id,
            "sliding_window_non_causal": non_causal,
            "sample_from_anchor": False,
        }


DRAFT = DFlashDraft
