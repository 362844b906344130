"""A target's tokenizer."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer


def read_tokenizer(folder: str | Path) -> Any:
    """The tokenizer of a Hugging Face folder, which callers share and do not change.

    A large vocabulary takes seconds to read, so the last ones are kept until a file of their folder changes. Code that
    comes with a target is never run; left to itself transformers asks on the terminal whether to run it.
    Raises ValueError or OSError where there is no tokenizer that transformers knows.
    """
    files = sorted(file for file in Path(folder).iterdir() if file.is_file()) if Path(folder).is_dir() else []
    return _read(str(folder), tuple((file.name, file.stat().st_mtime_ns) for file in files))


@lru_cache(maxsize=4)
def _read(folder: str, _version: tuple[tuple[str, int], ...]) -> Any:
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
