"""Which tokens end a target's text. Used by benchmarks."""

from pathlib import Path

from transformers import AutoConfig, GenerationConfig

GENERATION_CONFIG = "generation_config.json"


def eos_ids(target: Path) -> frozenset[int]:
    """By the generation configuration of the Hugging Face folder `target`, else by its model configuration."""
    ids = None
    if (target / GENERATION_CONFIG).is_file():
        ids = GenerationConfig.from_pretrained(target).eos_token_id
    if ids is None:
        ids = AutoConfig.from_pretrained(target).get_text_config().eos_token_id
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)
