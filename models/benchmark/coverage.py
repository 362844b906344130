"""How much of what the target would say a draft vocabulary can express."""

from collections.abc import Sequence

import torch

from models.drafts.vocabulary import DraftVocabulary
from models.targets.model import TargetModel

POSITIONS = 256
"""Looked at: each takes the target's whole head, which in small targets outweighs their layers."""
CHUNK = 64


@torch.no_grad()
def vocabulary_mass(
    target: TargetModel,
    vocabulary: DraftVocabulary,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[Sequence[int]],
    temperature: float,
) -> float:
    """Share of the target's probability, at `temperature`, on the draft vocabulary.

    Mean over the first `POSITIONS` positions of `texts`, the target's own continuations of `prompts`: what lies outside
    is rejected whatever the draft learns.
    """
    if len(vocabulary) == vocabulary.target_size:
        return 1.0
    ids, found = vocabulary.target_ids.to(target.device), list[float]()
    for prompt, text in zip(prompts, texts, strict=True):
        if len(found) >= POSITIONS:
            break
        states = target.forward(torch.tensor([[*prompt, *text[:-1]]], device=target.device)).last[0, len(prompt) - 1 :]
        for chunk in states.split(CHUNK):
            found += (target.logits(chunk) / temperature).softmax(-1)[:, ids].sum(-1).tolist()
    return sum(found) / len(found)
