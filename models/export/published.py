"""`python -m models.export.published RUN`: a published draft as the start of a run's training. Writes RUN/start.

`training.start_from` names a folder or a model of the Hub, in the layout of `speculators` (0.9.0) or of the method's
authors, which SGLang reads. What is written is an export like ours. A setting that our methods do not have is refused
by its name: such a draft would load wherever sizes agree, and know nothing. Nothing is unpickled: safetensors only.
"""

import argparse
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from infra.files.run_folder import RunFolder
from infra.processes.exit import run_main
from infra.records.data_path import TargetRecord
from infra.refusal import Refusal
from models.config.draft import DraftConfig, parse_draft_config
from models.config.recipe import RunConfig, read_config
from models.data.hub import model_folder
from models.drafts.base import Draft
from models.drafts.registry import build_draft
from models.drafts.vocabulary import DraftVocabulary
from models.export.description import BLOCK, CONFIG
from models.export.served_target import read_served_target
from models.export.sglang import MAPS, current_name, fill, write_export
from models.targets.weights import TargetHead, read_target_head, tensor_files

HUB_FILES = ["*.json", "*.safetensors"]
EMBEDDINGS, HEAD = "embed_tokens.weight", "lm_head.weight"


ARCHITECTURES = {
    "eagle3": {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle"},
    "dflash": {"DFlashDraftModel"},
}
"""The authors' names of each method."""

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class PublishedDraft:
    """What a published draft's `config.json` says."""

    method: str
    shape: dict[str, Any]
    """Fields of the method's configuration that say what the draft is."""
    aux_layer_ids: tuple[int, ...] | None
    """Layer ids in our numbering; None: unspecified, so the engine's default is meant."""
    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    """Size of the target's vocabulary."""


def read_published(settings: Settings) -> PublishedDraft:
    """Read the content of a `config.json`. Raises Refusal, with the setting, for what none of our methods is."""
    try:
        return _read(settings)
    except Refusal:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise Refusal(
            f"config.json of the draft is damaged or incomplete ({type(error).__name__}: {error}): correct it, or "
            "fetch the draft again"
        ) from error


def _read(settings: Settings) -> PublishedDraft:
    speculators = "speculators_model_type" in settings
    layer = settings
    if speculators:
        method, layer = settings["speculators_model_type"], settings.get("transformer_layer_config") or {}
        if method not in tuple(ARCHITECTURES):
            raise Refusal(f"its speculators_model_type {method!r} cannot be taken over: give an eagle3 or dflash draft")
    else:
        named = set(settings.get("architectures") or [])
        method = next((method for method, names in ARCHITECTURES.items() if named & names), None)
    if method is None:
        eagle3, dflash = (", ".join(sorted(names)) for names in ARCHITECTURES.values())
        raise Refusal(
            f"its architectures {sorted(named)} are none that can be taken over: EAGLE-3 ({eagle3}), DFlash ({dflash}) "
            "or the speculators layout. Give another draft"
        )
    shape, layer_ids = (_eagle3 if method == "eagle3" else _dflash)(layer, settings, speculators)
    hidden = int(layer["hidden_size"])
    return PublishedDraft(
        method=method,
        shape=shape,
        aux_layer_ids=None if layer_ids is None else tuple(layer_ids),
        hidden_size=hidden,
        target_hidden_size=int(settings.get("target_hidden_size") or hidden),
        vocab_size=int(layer["vocab_size"]),
    )


def default_layers(target_layers: int) -> tuple[int, ...]:
    """What engines read where an EAGLE-3 draft names no layers: inputs of layers 2, n // 2 and n - 3."""
    return (1, target_layers // 2 - 1, target_layers - 4)


def _eagle3(layer: Settings, settings: Settings, speculators: bool) -> tuple[dict[str, Any], list[int] | None]:
    """Shape and layer ids. `speculators` numbers layers by their inputs, we and the authors by their outputs."""
    _refuse(settings, {"norm_before_residual": False, "use_aux_norm": False})
    _refuse(layer, {"num_hidden_layers": 1, "mlp_bias": False})
    shape = _attention(layer) | {
        name: bool(settings.get(name)) for name in ("fc_norm", "norm_before_fc", "norm_output")
    }
    vocabulary, size = int(layer["vocab_size"]), settings.get("draft_vocab_size")
    # Without a size the head is the target's.
    shape |= {"vocab_size": None if size in (None, vocabulary) else size, "shared_head": size is None}
    if speculators:
        _refuse(layer, {"model_type": "llama"})
        ids = settings.get("eagle_aux_hidden_state_layer_ids")
        return shape, ids and [layer_id - 1 for layer_id in ids]
    eagle = settings.get("eagle_config") or {}
    _refuse(eagle, {"use_aux_hidden_state": True})
    shape["norm_before_fc"] |= bool(eagle.get("norm_before_fc"))
    return shape, eagle.get("eagle_aux_hidden_state_layer_ids")


def _dflash(layer: Settings, settings: Settings, speculators: bool) -> tuple[dict[str, Any], list[int]]:
    """Shape and layer ids, numbered as in `_eagle3`."""
    types = layer.get("layer_types") or ["full_attention"] * layer["num_hidden_layers"]
    window = layer.get("sliding_window") if "sliding_attention" in types else None
    _refuse(settings, {"sample_from_anchor": False})
    if window is not None:
        _refuse(settings, {"sliding_window_non_causal": False})
    if speculators:
        own = settings
        _refuse(settings, {"draft_vocab_size": layer["vocab_size"]})
        ids = [layer_id - 1 for layer_id in own["aux_hidden_state_layer_ids"]]
    else:
        own = settings.get("dflash_config") or {}
        ids = own.get("target_layer_ids")
        if ids is None:
            raise Refusal("its dflash_config names no target_layer_ids: add them")
    shape = _attention(layer) | {"layer_types": list(types), "sliding_window": window, "fc_norm": False}
    shape |= {"block_size": settings.get("block_size") or own.get("block_size")}
    return shape | {"mask_token_id": own.get("mask_token_id")}, ids


def _attention(layer: Settings) -> dict[str, Any]:
    """Attention settings of a Llama or Qwen3 layer, with Hugging Face's defaults."""
    _refuse(layer, {"attention_bias": False, "hidden_act": "silu"})
    rope = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise Refusal(f"its rope_type is {kind!r}, drafts here have the default one: give another draft")
    heads = int(layer["num_attention_heads"])
    return {
        "num_heads": heads,
        "num_kv_heads": int(layer.get("num_key_value_heads") or heads),
        "head_dim": int(layer.get("head_dim") or layer["hidden_size"] // heads),
        "intermediate_size": int(layer["intermediate_size"]),
        "rope_theta": float(rope.get("rope_theta") or layer.get("rope_theta") or 10_000.0),
        "rms_norm_eps": float(layer.get("rms_norm_eps", 1e-6)),
    }


def _refuse(settings: Settings, expected: Settings) -> None:
    for name, value in expected.items():
        found = settings.get(name, value)
        if found is not None and found != value:
            raise Refusal(f"its {name} is {found!r}, drafts here have {value!r}: give another draft")


def fetch_published(name: str) -> Path:
    """The folder `name`, or the Hub's snapshot of OWNER/NAME or OWNER/NAME@REVISION. Raises Refusal for neither."""
    hub_id, revision = (name, "") if Path(name).expanduser().is_dir() else name.partition("@")[::2]
    return model_folder("training.start_from", hub_id, revision or None, HUB_FILES)


def load_published(folder: Path, config: DraftConfig, target: TargetRecord) -> Draft:
    """A published draft as one of ours; how it is trained further comes from `config`.

    Raises Refusal with all that keeps it from being a draft for this target.
    """
    if not (folder / CONFIG).is_file():
        raise Refusal(f"there is no {CONFIG}")
    found = read_published(json.loads((folder / CONFIG).read_text()))
    _check_target(found, target)
    tensors, head = _read_tensors(folder), read_target_head(Path(target.path), torch.float32)
    own_embeddings = EMBEDDINGS in tensors and not _same(tensors[EMBEDDINGS], head.embedding)
    vocabulary = _vocabulary(found, tensors)
    method = _method(found, config, own_embeddings)
    draft = build_draft(method, head.embedding, vocabulary, found.aux_layer_ids or default_layers(target.num_layers))
    draft.start_from(head.head)
    _load(draft, tensors, head)
    return draft


def _check_target(found: PublishedDraft, target: TargetRecord) -> None:
    sizes = {
        "hidden_size": (found.hidden_size, target.hidden_size),
        "target_hidden_size": (found.target_hidden_size, target.hidden_size),
        "vocab_size": (found.vocab_size, target.vocab_size),
    }
    wrong = [f"its {name} is {its}, the target's {ours}" for name, (its, ours) in sizes.items() if its != ours]
    layers = found.aux_layer_ids or ()
    if layers and (list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= target.num_layers):
        wrong.append(f"it reads layers {list(layers)}, the target has 0..{target.num_layers - 1}")
    if wrong:
        raise Refusal("; ".join(wrong))


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """Tensors by our names, floats in float32, without those that belong to the target."""
    if not list(folder.glob("*.safetensors")):
        raise Refusal("it has no safetensors files (nothing from outside is unpickled): convert its weights first")
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(tensor_files(folder).values())):
        for name, tensor in load_file(folder / file).items():
            ours = current_name(name).removeprefix("model.")
            tensors[ours] = tensor.float() if tensor.is_floating_point() else tensor
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("verifier_")}


def _vocabulary(found: PublishedDraft, tensors: Mapping[str, Tensor]) -> DraftVocabulary:
    """The vocabulary of `d2t`; `t2d`, if present, must agree."""
    size = found.shape.get("vocab_size")
    if size is None:
        return DraftVocabulary(torch.arange(found.vocab_size), found.vocab_size)
    if "d2t" not in tensors:
        raise Refusal(f"it proposes {size} of the target's {found.vocab_size} tokens and has no map d2t of them")
    try:
        vocabulary = DraftVocabulary.from_offsets(tensors["d2t"], found.vocab_size)
    except Refusal as error:
        raise Refusal(f"its map d2t is damaged: {error}") from error
    if len(vocabulary) != size:
        raise Refusal(f"its map d2t has {len(vocabulary)} tokens, its draft_vocab_size is {size}")
    if "t2d" in tensors and not torch.equal(tensors["t2d"].bool(), vocabulary.t2d):
        raise Refusal("its maps d2t and t2d contradict each other")
    return vocabulary


def _method(found: PublishedDraft, config: DraftConfig, own_embeddings: bool) -> DraftConfig:
    """The method with this shape, and the recipe's training settings if it names the same method."""
    shape = found.shape | ({"train_embeddings": own_embeddings} if found.method == "eagle3" else {})
    if config.method != found.method:
        raise Refusal(f"its method is {found.method}, the recipe's draft.method {config.method}")
    training = config.model_dump(include=set(config.training_only))
    return parse_draft_config(training | shape | {"method": found.method})


def _load(draft: Draft, tensors: Mapping[str, Tensor], head: TargetHead) -> None:
    """Load the weights, without the tables that the draft shares with the target, which may be stored all the same."""
    shared = {EMBEDDINGS: head.embedding, HEAD: head.head}
    expected = draft.state_dict()
    given = {
        name: tensor
        for name, tensor in tensors.items()
        if name in expected or not (name in MAPS or (name in shared and _same(tensor, shared[name])))
    }
    fill(draft, given, "it")


def _same(stored: Tensor, ours: Tensor) -> bool:
    """Up to the rounding of a bfloat16 copy."""
    return stored.shape == ours.shape and torch.allclose(stored, ours, rtol=2**-7, atol=1e-6)


def import_start(name: str, config: RunConfig, target: TargetRecord, folder: Path) -> str:
    """Write the published draft `name` as an export into `folder`; one line for people."""
    source = fetch_published(name)
    if (source / CONFIG).is_file() and BLOCK in json.loads((source / CONFIG).read_text()):
        shutil.copytree(source, folder)
        return f"training starts from {name}, an export of Draftsmith"
    try:
        draft = load_published(source, config.draft, target)
    except (ValueError, KeyError) as error:
        reason = f"its config.json lacks {error}" if isinstance(error, KeyError) else str(error)
        raise Refusal(
            f"training.start_from={name} cannot start this run: {reason}. Give another draft, or "
            "leave training.start_from out"
        ) from error
    # It is trained further, not served: nothing is rounded.
    served = replace(read_served_target(Path(target.path)), dtype=torch.float32)
    write_export(draft, folder, {"published": name}, served)
    return f"training starts from the published draft {name}, with its vocabulary of {len(draft.vocabulary):,} tokens"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    run = RunFolder(parser.parse_args().run.absolute())
    config, target = read_config(run.config), TargetRecord.read(run.target)
    assert isinstance(config.training.start_from, str)
    aside = run.path / "start.part"
    shutil.rmtree(aside, ignore_errors=True)
    said = import_start(config.training.start_from, config, target, aside)
    aside.replace(run.start)
    print(said, flush=True)


if __name__ == "__main__":
    run_main(main)
