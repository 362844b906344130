"""`python -m models.export.published RUN`: a published draft as the start of a run's training. Writes RUN/start.

The draft is a folder or a model of the Hub, in the layout of `speculators` or in the authors' (which SGLang reads), as
`training.start_from` names it. What is written is an export like ours, so that whatever begins with a registered
version begins with it as well. Nothing is unpickled: safetensors only.
"""

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import safe_open
from torch import Tensor

from infra.files.run_folder import RunFolder
from infra.processes.exit import run_main
from infra.records.data_path import TargetRecord
from infra.refusal import Refusal
from models.config.draft import DraftConfig, parse_draft_config
from models.config.recipe import RunConfig, read_config
from models.drafts.base import Draft
from models.drafts.registry import build_draft
from models.drafts.vocabulary import DraftVocabulary
from models.export.description import BLOCK, CONFIG
from models.export.published_config import PublishedDraft, default_layers, read_published
from models.export.sglang import MAPS, current_name, write_export
from models.targets.weights import TargetHead, read_target_head, tensor_files

HUB_FILES = ["*.json", "*.safetensors"]
EMBEDDINGS, HEAD = "embed_tokens.weight", "lm_head.weight"


def fetch_published(name: str) -> Path:
    """The folder `name`, or the Hub's snapshot of OWNER/NAME or OWNER/NAME@REVISION. Raises Refusal for neither."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    hub_id, _, revision = name.partition("@")
    try:
        return Path(snapshot_download(hub_id, revision=revision or None, allow_patterns=HUB_FILES))
    except LocalEntryNotFoundError as error:
        raise Refusal(
            f"training.start_from={name} is no folder (looked in {Path.cwd()}), and the Hub cannot be reached: check "
            "the network, or give a local folder"
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise Refusal(
            f"training.start_from={name} is no folder (looked in {Path.cwd()}), and no model of the Hub: {error}"
        ) from error


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
    _fill(draft, tensors, head)
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
        with safe_open(folder / file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no dictionary)
                tensor = opened.get_tensor(name)
                tensors[current_name(name).removeprefix("model.")] = (
                    tensor.float() if tensor.is_floating_point() else tensor
                )
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


def _fill(draft: Draft, tensors: Mapping[str, Tensor], head: TargetHead) -> None:
    """Raises Refusal, naming the tensors, unless they are exactly the draft's."""
    # A table that the draft shares with the target may be stored all the same.
    shared = {EMBEDDINGS: head.embedding, HEAD: head.head}
    expected = draft.state_dict()
    given = {
        name: tensor
        for name, tensor in tensors.items()
        if name in expected or not (name in MAPS or (name in shared and _same(tensor, shared[name])))
    }
    wrong = sorted(
        name
        for name in {*given, *expected}
        if name not in given or name not in expected or given[name].shape != expected[name].shape
    )
    if wrong:
        raise Refusal(f"it has missing, unknown or misshapen tensors: {', '.join(wrong)}")
    draft.load_state_dict(dict(given))


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
    # It cannot say for which revision of its target it was made: this one is taken at its word.
    write_export(draft, folder, {"target_revision": target.revision, "published": name})
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
