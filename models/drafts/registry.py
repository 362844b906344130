"""Finds a draft method's module by its name: `models/drafts/<method>/module.py` names its class `DRAFT`."""

import importlib
from collections.abc import Sequence

from torch import Tensor

from models.config.draft import DraftConfig
from models.drafts.base import Draft
from models.drafts.vocabulary import DraftVocabulary


def build_draft(
    config: DraftConfig, embedding: Tensor, vocabulary: DraftVocabulary, aux_layer_ids: Sequence[int]
) -> Draft:
    """An untrained draft of the configured method; `embedding` is the target's, `[V, H]`."""
    module = importlib.import_module(f"models.drafts.{config.method}.module")
    return module.DRAFT(config, embedding, vocabulary, aux_layer_ids)
