"""`python sglang_model_config.py FOLDER...`, in SGLang's environment: how a server reads a target and its draft.

A FOLDER holds `target/config.json` and `draft/config.json`. Prints JSON: for each folder the data type and the context
length of both, by SGLang's own code with default arguments; the draft's context is asked for as a server does.
"""

import json
import sys
from pathlib import Path

from sglang.srt.configs.model_config import ModelConfig


def read(folder: Path) -> dict[str, list]:
    target = ModelConfig(str(folder / "target"), dtype="auto")
    draft = ModelConfig(str(folder / "draft"), dtype="auto", context_length=target.context_len, is_draft_model=True)
    return {
        name: [str(one.dtype), one.context_len, one.hf_text_config.max_position_embeddings]
        for name, one in (("target", target), ("draft", draft))
    }


if __name__ == "__main__":
    print(json.dumps([read(Path(argument)) for argument in sys.argv[1:]]))
