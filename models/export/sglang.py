"""Export as a Hugging Face folder, and loading it back. `python -m models.export.sglang RUN` writes RUN/export.

`model.safetensors` holds the draft's parameters, under the names that SGLang and vLLM give them where they serve the
method, and the maps `d2t` (offsets) and `t2d` where the draft vocabulary is not the whole. `config.json` is what SGLang
reads, what vLLM reads (the `speculators` format), and in a block of its own what Draftsmith builds the draft from
again. `README.md` is the model card, `chat_template.jinja` the template that the recipe names, if it does. SGLang skips
tensors with unknown names in silence, so names and shapes are compared here.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from infra.files.atomic import sha256_file, write_atomically
from infra.processes.exit import run_main
from infra.records.data_path import TrainingResult
from infra.records.drafts import BLOCK, CONFIG, WEIGHTS, CapturePrecision, ExportRecord
from infra.refusal import Refusal
from models.checkpoint import AVERAGED, DRAFT, VOCABULARY, DraftDescription
from models.config.draft import parse_draft_config
from models.data.chat_template import read_template_file
from models.drafts.base import Draft
from models.drafts.mtp.experts import BIAS
from models.drafts.registry import build_draft
from models.drafts.vocabulary import DraftVocabulary
from models.export.card import CHAT_TEMPLATE, write_card
from models.export.description import (
    SGLANG,
    SPECULATORS,
    ExportDescription,
    block_of,
    read_description,
    speculators_settings,
    start_of,
)
from models.export.served_target import ServedTarget, read_served_target
from models.export.stitched import can_link, stitch
from models.run import PreparedRun
from models.targets.own_layer import OwnLayer
from models.targets.weights import read_target_head, tensor_files
from models.tensor_file import write_tensors

MAPS = ("d2t", "t2d")
NOT_THE_LAYERS = ("quantization_config", "auto_map")
"""What a target's `config.json` says of other tensors, and of code that is not in the export's folder."""


def export_checkpoint(
    checkpoint: Path, target: Path, folder: Path, extra: dict[str, Any], hub_id: str | None = None, lookahead: int = 4
) -> ExportRecord:
    """Write the averaged weights of `checkpoint` as a Hugging Face folder, and read it back once.

    `extra` goes into `config.json` under `draftsmith` (licence, revisions), `hub_id` and `lookahead` into vLLM's part
    (see `speculators_settings`). Weights are rounded to the data type that the target is served in. Raises Refusal
    where the export would not load: other tensor names or shapes.
    """
    description: DraftDescription = DraftDescription.read(checkpoint / DRAFT)
    tensors = load_file(checkpoint / AVERAGED)
    vocabulary = DraftVocabulary(tensors.pop(VOCABULARY), description.target_vocab_size)
    head = read_target_head(target, torch.float32)
    config = parse_draft_config(description.config)
    draft = build_draft(config, head.embedding, vocabulary, description.aux_layer_ids)
    draft.start_from(head.head)
    draft.load_state_dict(tensors)
    served = read_served_target(target)
    speculators = speculators_settings(draft, served, hub_id, lookahead)
    write_export(draft, folder, extra, served, speculators)
    reloaded = load_draft(folder, target, served.dtype).state_dict()
    for name, tensor in draft.state_dict().items():
        if not torch.equal(reloaded[name], _rounded(name, tensor, served.dtype)):
            raise ValueError(f"export of {checkpoint} does not read back: {name} differs")
    sglang = (SGLANG,) if draft.engine_config() is not None else ()
    return ExportRecord(
        path=str(folder),
        layouts=(*sglang, *((SPECULATORS,) if speculators is not None else ())),
        sha256={p.name: sha256_file(p) for p in sorted(folder.iterdir())},
    )


def write_export(
    draft: Draft, folder: Path, extra: dict[str, Any], target: ServedTarget, speculators: dict[str, Any] | None = None
) -> None:
    """Write `draft` into `folder`, in place of what is there; `speculators` is vLLM's part of `config.json`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    vocabulary, engine = draft.vocabulary, draft.engine_config()
    maps = {} if vocabulary.whole else {"d2t": vocabulary.d2t, "t2d": vocabulary.t2d}
    of_target = draft.target_tensors()
    given = of_target or draft.state_dict() | draft.engine_copies()
    tensors = {name: _rounded(name, each, target.dtype) for name, each in given.items()}
    write_tensors(folder / WEIGHTS, tensors | maps)
    block = block_of(draft.config, draft.aux_layer_ids, vocabulary.target_size, served=engine is not None)
    own = {name: value for name, value in target.tree.items() if of_target and name not in NOT_THE_LAYERS}
    settings = own | (speculators or {}) | (engine or {}) | target.settings | {BLOCK: extra | block}
    write_atomically(folder / CONFIG, json.dumps(settings, indent=2) + "\n")


def _rounded(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """As it is exported. Engines keep the bias of a router in float32: rounded, it would choose other experts."""
    kept = name.endswith(BIAS)
    return tensor.detach().to("cpu", torch.float32 if kept else dtype).contiguous()


def load_draft(folder: Path, target: Path, dtype: torch.dtype, device: str | torch.device = "cpu") -> Draft:
    """Load an exported draft for decoding with the target in `target` (whose embeddings, and perhaps head, it shares).

    Raises Refusal, naming the tensors, for a folder that is not a whole export.
    """
    if not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
        raise Refusal(f"{folder} is not an exported draft: it needs {CONFIG} and {WEIGHTS}")
    description = read_description(folder)
    tensors = {current_name(name): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    vocabulary = _vocabulary(folder, description, tensors)
    head = read_target_head(target, dtype)
    if len(head.embedding) != vocabulary.target_size:
        raise Refusal(
            f"{folder} belongs to a target with {vocabulary.target_size} tokens, {target} has {len(head.embedding)}"
        )
    draft = build_draft(description.config, head.embedding, vocabulary, description.aux_layer_ids)
    draft.start_from(head.head)
    others = {*MAPS, *draft.engine_copies()}
    fill(draft, {name: tensor for name, tensor in tensors.items() if name not in others}, f"{folder}/{WEIGHTS}")
    return draft.to(device, dtype).eval()


def fill(draft: Draft, tensors: dict[str, Tensor], source: str) -> None:
    """Load the draft's weights. Raises Refusal, naming the tensors, unless they are exactly the draft's."""
    weights = draft.target_tensors(tensors) or draft.state_dict()
    given, own = ({(name, each.shape) for name, each in part.items()} for part in (tensors, weights))
    if given != own:
        wrong = sorted({name for name, _ in given ^ own})
        raise Refusal(f"{source} has missing, unknown or misshapen tensors: {', '.join(wrong)}")
    for name, weight in weights.items():
        weight.copy_(tensors[name])


def current_name(name: str) -> str:
    """EAGLE-3's one layer is `midlayer` in the authors' layout and in drafts exported before."""
    return name.replace("midlayer.", "layers.0.")


def _vocabulary(folder: Path, description: ExportDescription, tensors: dict[str, Tensor]) -> DraftVocabulary:
    size = description.target_vocab_size
    if "d2t" in tensors:
        return DraftVocabulary.from_offsets(tensors["d2t"], size)
    if description.config.vocabulary_size(size) != size:
        raise Refusal(f"{folder}/{WEIGHTS} has no vocabulary map d2t: export the draft again")
    return DraftVocabulary(torch.arange(size), size)


def _stitch(run: PreparedRun) -> None:
    """Put a layer that the target comes with into a copy of the target, where that takes no room."""
    if run.config.draft.reads_layers:
        return  # no such layer does
    target, folder = Path(run.target.path), run.folder.stitched
    shutil.rmtree(folder, ignore_errors=True)
    draft = load_draft(run.folder.export, target, torch.float32)
    if OwnLayer.find(target, draft.target_tensors(tensor_files(target))).quantized:
        print(
            "the target's own layer is quantized, so this one is no part of a copy of it: serve the export", flush=True
        )
    elif can_link(target, folder):
        written = stitch(draft, target, folder)
        print(f"{folder} is the target with this layer; written again: {', '.join(written)}", flush=True)
    else:
        print(
            f"the target is on another file system, so its files are not linked: to copy them, python -m "
            f"models.export.stitch {run.folder.export} {target} FOLDER",
            flush=True,
        )


def main() -> None:
    run = PreparedRun.open(Path(sys.argv[1]))
    result: TrainingResult = TrainingResult.read(run.folder.training)
    start = start_of(run)
    extra = {
        "target": run.target.name,
        "target_revision": run.target.revision,
        "target_licence": run.target.licence,
        "dataset_hash": run.samples.dataset_hash,
        "run": run.folder.name,
        "step": result.steps,
        "trained_tokens": result.tokens,
        "precision": CapturePrecision.read(run.folder.precision).model_dump(),
        "started_from": start and start.model_dump(),
    }
    record = export_checkpoint(
        run.folder.path / result.checkpoint,
        Path(run.target.path),
        run.folder.export,
        extra,
        run.config.target.hub_id,
        run.config.benchmark.lookahead,
    )
    files = dict(record.sha256)
    if template := read_template_file(run.config.data.chat_template):
        write_atomically(run.folder.export / CHAT_TEMPLATE, template)
        files[CHAT_TEMPLATE] = sha256_file(run.folder.export / CHAT_TEMPLATE)
    write_atomically(run.folder.exported, record.model_copy(update={"started_from": start, "sha256": files}))
    write_card(run, result=None)
    _stitch(run)
    print(f"exported the draft of step {result.steps} to {record.path}", flush=True)


if __name__ == "__main__":
    run_main(main)
