"""What SGLang's own class for an architecture can do, asked of SGLang in its environment.

`python -m models.capture.sglang.model_class ARCHITECTURE` there prints a `ModelClass` as JSON.
"""

import inspect
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from infra.records.data_path import Record
from infra.refusal import Refusal
from infra.sglang.command import sglang_python

CAPTURED_AS = {"MiMoForCausalLM": "Qwen2ForCausalLM"}
"""Architectures whose class in SGLang (0.5.23) captures nothing, and the class that computes the same and does."""
ASKED_S = 300.0
"""Limit for importing all of SGLang's models, which takes 10 s on a CPU."""


class ModelClass(Record):
    """A class of SGLang for a target."""

    name: str | None
    """None: SGLang has none of its own, and wraps transformers' model."""
    is_known: bool = True
    """False if the class exists but its module cannot be imported on this machine: all else is unknown."""
    captures: bool = False
    """Whether it hands over outputs of chosen layers, for captures and for EAGLE-3 drafts."""
    shares_tables: bool = False
    """Whether it gives an EAGLE-3 draft its embedding and head."""
    captures_blocks: bool = False
    """Whether it does so for DFlash drafts."""
    scales_embeddings: bool = False
    """Whether its embedding multiplies the rows that it looks up, for a block draft too, which is trained on the rows
    themselves."""
    has_windows: bool = False
    """Whether its attention can have sliding windows."""


@cache
def ask_sglang(architecture: str) -> ModelClass:
    """The class that a server would load. Raises Refusal if SGLang cannot be imported."""
    command = [str(sglang_python()), "-m", "models.capture.sglang.model_class", architecture]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ASKED_S, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise Refusal(f"generator.engine=sglang: SGLang cannot be imported ({last}): run `make sglang` again")
    return ModelClass.model_validate_json(done.stdout.splitlines()[-1])


def _describe(architecture: str) -> ModelClass:
    import sglang.srt.models  # pyright: ignore[reportMissingImports]
    from sglang.srt.models.registry import ModelRegistry  # pyright: ignore[reportMissingImports]

    if not ModelRegistry.is_arch_supported(architecture):
        sources = Path(sglang.srt.models.__path__[0]).rglob("*.py")
        broken = any(f"class {architecture}(" in path.read_text() for path in sources)
        return ModelClass(name=architecture if broken else None, is_known=not broken)
    kind, _ = ModelRegistry.resolve_model_cls([architecture])
    return ModelClass(
        name=kind.__name__,
        captures=hasattr(kind, "set_eagle3_layers_to_capture"),
        shares_tables=hasattr(kind, "get_embed_and_head"),
        captures_blocks=hasattr(kind, "set_dflash_layers_to_capture"),
        scales_embeddings=_scales_embeddings(kind),
        has_windows=hasattr(kind, "get_attention_sliding_window_size"),
    )


def _scales_embeddings(kind: type) -> bool:
    """Whether the class or a part of it is written beside an embedding with a scale, as Gemma's are."""
    from torch import nn

    own = vars(sys.modules[kind.__module__]).values()
    parts = {one.__module__ for one in own if isinstance(one, type) and issubclass(one, nn.Module)}
    near = (one for module in parts for one in vars(sys.modules[module]).values() if isinstance(one, type))
    return any(issubclass(one, nn.Module) and _is_scaled_table(one) for one in near)


def _is_scaled_table(kind: type) -> bool:
    """Whether a module is a table of embeddings that is built with `embed_scale`."""
    given = inspect.signature(kind).parameters
    return "embed_scale" in given and "embedding_dim" in given


if __name__ == "__main__":
    # It only asks: a GPU that another process leased stays untouched.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    print(_describe(sys.argv[1]).model_dump_json())
