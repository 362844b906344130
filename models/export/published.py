"""`python -m models.export.published RUN`: a published draft as the start of a run's training. Writes RUN/start.

`training.start_from` names a folder or a model of the Hub, in the layout of `speculators` (0.9.0) or of the method's
authors, which SGLang and vLLM read. What is written is an export like ours. Where there are no safetensors files,
PyTorch's are read, as tensors only: nothing in them is run.
"""

import json
import pickle
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors.torch import load_file
from torch import Tensor

from infra.files.run_folder import RunFolder
from infra.processes.exit import run_main
from infra.records.data_path import TargetRecord
from infra.records.drafts import BLOCK, CONFIG
from infra.refusal import Refusal
from models.config.draft import DraftConfig, parse_draft_config
from models.config.recipe import RunConfig, read_config
from models.data.hub import model_folder
from models.drafts.base import Draft
from models.drafts.registry import build_draft
from models.drafts.vocabulary import DraftVocabulary
from models.export.published_section import Settings
from models.export.published_settings import PublishedDraft, first_error, read_published
from models.export.served_target import read_served_target
from models.export.sglang import MAPS, current_name, fill, write_export
from models.targets.weights import TargetHead, read_target_head, tensor_files

SAFE_FILES, PICKLED_FILES = ["*.json", "*.safetensors"], ["*.json", "*.bin"]
OLDER_NAMES = {
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
    "logit_head.": "",
}
EMBEDDINGS, HEAD = "embed_tokens.weight", "lm_head.weight"


def default_layers(target_layers: int) -> tuple[int, ...]:
    """What engines read where an EAGLE-3 draft names no layers: inputs of layers 2, n // 2 and n - 3."""
    return (1, target_layers // 2 - 1, target_layers - 4)


def fetch_published(name: str) -> Path:
    """The folder `name`, or the Hub's snapshot of OWNER/NAME or OWNER/NAME@REVISION. Raises Refusal for neither."""
    hub_id, revision = (name, "") if Path(name).expanduser().is_dir() else name.partition("@")[::2]
    folder = model_folder("training.start_from", hub_id, revision or None, SAFE_FILES)
    if list(folder.glob("*.safetensors")):
        return folder
    return model_folder("training.start_from", hub_id, revision or None, PICKLED_FILES)


def load_published(folder: Path, config: DraftConfig, target: TargetRecord) -> Draft:
    """A published draft as one of ours; how it is trained further comes from `config`.

    Raises Refusal with all that keeps it from being a draft for this target.
    """
    if not (folder / CONFIG).is_file():
        raise Refusal(f"there is no {CONFIG}")
    found = read_published(_read_settings(folder))
    _check_target(found, target)
    tensors, head = _read_tensors(folder), read_target_head(Path(target.path), torch.float32)
    own_embeddings = EMBEDDINGS in tensors and not _same(tensors[EMBEDDINGS], head.embedding)
    vocabulary = _vocabulary(found, tensors)
    method = _method(found, config, own_embeddings, head)
    draft = build_draft(method, head.embedding, vocabulary, found.aux_layer_ids or default_layers(target.num_layers))
    draft.start_from(head.head)
    _load(draft, tensors, head)
    return draft


def _read_settings(folder: Path) -> Settings:
    try:
        return json.loads((folder / CONFIG).read_text())
    except ValueError as error:
        raise Refusal(f"its {CONFIG} is damaged ({error})") from error


def _check_target(found: PublishedDraft, target: TargetRecord) -> None:
    sizes = {
        "target_hidden_size": (found.target_hidden_size, target.hidden_size),
        "vocab_size": (found.vocab_size, target.vocab_size),
    }
    if found.target_hidden_size == found.hidden_size or found.method != "eagle3":
        # Without a size of the target's, the draft's is that.
        sizes["hidden_size"] = (found.hidden_size, target.hidden_size)
    wrong = [f"its {name} is {its}, the target's {ours}" for name, (its, ours) in sizes.items() if its != ours]
    layers = found.aux_layer_ids or ()
    if layers and (list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= target.num_layers):
        wrong.append(f"it reads layers {list(layers)}, the target has 0..{target.num_layers - 1}")
    if wrong:
        raise Refusal("; ".join(wrong))


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """Tensors by our names, floats in float32, without those that belong to the target."""
    tensors: dict[str, Tensor] = {}
    for file in _weight_files(folder):
        for name, tensor in _read_file(file).items():
            tensors[_our_name(name)] = tensor.float() if tensor.is_floating_point() else tensor
    later = [name for name in tensors if name.endswith(".hidden_norm.weight") and name.startswith("layers.")]
    for name in sorted(set(later) - {"layers.0.hidden_norm.weight"}):
        # SGLang's name of a later layer's first norm; others have a norm of ours there, which SGLang does not read.
        ours, given = name.replace("hidden_norm", "input_layernorm"), tensors.pop(name)
        if ours in tensors and not torch.equal(tensors[ours], given):
            raise Refusal(f"its {name}, which SGLang reads, and its {ours}, which vLLM reads, differ")
        tensors[ours] = given
    foreign = ("verifier_", "rotary_emb.")
    return {name: tensor for name, tensor in tensors.items() if not any(part in name for part in foreign)}


def _our_name(name: str) -> str:
    for older, ours in OLDER_NAMES.items():
        name = name.replace(older, ours)
    return current_name(name).removeprefix("model.")


def _weight_files(folder: Path) -> list[Path]:
    """Files of a draft's weights, one or several. Raises Refusal without any."""
    if list(folder.glob("*.safetensors")):
        return [folder / file for file in sorted(set(tensor_files(folder).values()))]
    index, single = folder / "pytorch_model.bin.index.json", folder / "pytorch_model.bin"
    if index.is_file():
        return [folder / file for file in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    if not single.is_file():
        raise Refusal("it has neither model.safetensors nor pytorch_model.bin")
    return [single]


def _read_file(file: Path) -> dict[str, Tensor]:
    """The tensors in a file. Raises Refusal for a file of PyTorch's that holds anything else."""
    if file.suffix == ".safetensors":
        return load_file(file)
    try:
        # Only tensors and plain containers are unpickled.
        found = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise Refusal(f"its {file.name} is damaged, or holds more than tensors, which is not run") from error
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise Refusal(f"its {file.name} holds no mapping of names to tensors")
    return dict(found)


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


def _method(found: PublishedDraft, config: DraftConfig, own_embeddings: bool, head: TargetHead) -> DraftConfig:
    """The method with this shape, and the recipe's training settings if it names the same method."""
    if config.method != found.method:
        raise Refusal(f"its method is {found.method}, the recipe's draft.method {config.method}")
    shape = dict(found.shape)
    if found.method == "eagle3":
        shape["train_embeddings"] = own_embeddings and found.hidden_size == found.target_hidden_size
    if found.tied and shape["vocab_size"] is None:
        # Engines then take the embeddings for the head; of a pruned vocabulary they cannot.
        if own_embeddings or not torch.equal(head.head, head.embedding):
            raise Refusal("its head is its embeddings (tie_word_embeddings), and the target's head is another")
        shape |= {"shared_head": True} if found.method == "eagle3" else {}
    training = config.model_dump(include=set(config.training_only))
    try:
        return parse_draft_config(training | shape | {"method": found.method})
    except ValidationError as error:
        raise Refusal(f"drafts here cannot be of its shape: {first_error(error)}") from error


def _load(draft: Draft, tensors: Mapping[str, Tensor], head: TargetHead) -> None:
    """Load the weights, without the tables that the draft shares with the target, which may be stored all the same."""
    shared = {EMBEDDINGS: head.embedding, HEAD: head.head[draft.vocabulary.target_ids]}
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
    try:
        if (source / CONFIG).is_file() and BLOCK in _read_settings(source):
            shutil.copytree(source, folder)
            return f"training starts from {name}, an export of Draftsmith"
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
    run = RunFolder(Path(sys.argv[1]).absolute())
    config, target = read_config(run.config), TargetRecord.read(run.target)
    assert isinstance(config.training.start_from, str)
    aside = run.path / "start.part"
    shutil.rmtree(aside, ignore_errors=True)
    said = import_start(config.training.start_from, config, target, aside)
    aside.replace(run.start)
    print(said, flush=True)


if __name__ == "__main__":
    run_main(main)
