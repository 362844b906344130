"""What a running server has to load to serve another version: no restart, and no request is lost (SGLang 0.5.23).

    python -m models.export.swap OLD NEW

writes it to standard output, or says why such a server has to be restarted.

Only weights may differ between the two versions. A server keeps what it made of everything else when it started: of the
settings in `config.json`, and of the draft vocabulary. Tensors that are the same in both versions are not sent. The
embedding must be among them, because SGLang's drafts share the target's.
"""

import argparse
import base64
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from infra.processes.exit import run_main
from infra.records.drafts import BLOCK, CONFIG, WEIGHTS
from infra.refusal import Refusal

EXACT = frozenset({"LlamaForCausalLMEagle3", "DFlashDraftModel", "DFlash2DraftModel"})
"""Architectures whose servers accepted after a swap exactly as after a restart, in a test with SGLang 0.5.23. Not among
them: Qwen3DSparkModel, which accepted differently, and Domino (a DFlashDraftModel with a projector), whose server died.
"""


def changed_tensors(old: Path, new: Path) -> dict[str, torch.Tensor]:
    """The tensors of the version in `new` that differ from those in `old`.

    Raises Refusal where a server with the old version could not serve the new one exactly.
    """
    described = [_described(place) for place in (old, new)]
    if described[0] != described[1]:
        raise Refusal("its settings (config.json) differ")
    (architecture,) = described[1].get("architectures") or [None]
    projector = described[1].get("dflash_config", {}).get("projector_type")
    if architecture not in EXACT or projector is not None:
        raise Refusal(f"swaps of {projector or architecture} are not known to be exact")
    before, after = _weights(old), _weights(new)
    if _form(before) != _form(after):
        raise Refusal("its tensors have other names, shapes or dtypes")
    changed = {name: tensor for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    if kept := sorted(name for name in changed if not changed[name].is_floating_point() or "embed_tokens" in name):
        raise Refusal(f"{', '.join(kept)} differ, of which a server keeps a copy")
    return changed


def serialized(tensors: dict[str, torch.Tensor]) -> str:
    """As SGLang's `/update_weights_from_tensor` reads them: a pickle that holds the values, in base64."""
    return base64.b64encode(pickle.dumps([(name, tensor.clone()) for name, tensor in tensors.items()])).decode()


def _described(place: Path) -> dict[str, Any]:
    """What the engine reads, without our own notes."""
    try:
        described = json.loads((place / CONFIG).read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise Refusal(f"{place / CONFIG} cannot be read ({error})") from error
    return {key: value for key, value in described.items() if key != BLOCK}


def _weights(place: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(place / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise Refusal(f"{place / WEIGHTS} cannot be read ({error})") from error


def _form(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    options = parser.parse_args()
    sys.stdout.write(serialized(changed_tensors(options.old, options.new)))


if __name__ == "__main__":
    run_main(main)
