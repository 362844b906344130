"""A target's tokenizer."""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer


def read_tokenizer(folder: str | Path) -> Any:
    """The tokenizer of a Hugging Face folder.

    Code that comes with a target is never run; left to itself transformers asks on the terminal whether to run it.
    Raises ValueError or OSError where there is no tokenizer that transformers knows.
    """
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
