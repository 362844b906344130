"""Export in SGLang's EAGLE-3 layout, and loading it back. `python -m models.export.sglang RUN` writes RUN/export.

Layout (SGLang 0.5.23, `LlamaForCausalLMEagle3`): `config.json` and `model.safetensors` with `fc`, `fc_norm.*`,
`midlayer.*`, `norm`, `lm_head`, `d2t` (offsets) and `t2d`. The engine takes the embeddings from the target.
It skips tensors with unknown names in silence, so names and shapes are compared here.
"""

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from infra.exit import run_main
from infra.files import sha256_file, write_atomically
from infra.records import ExportRecord, TrainingResult
from models.drafts.base import Draft
from models.drafts.eagle3.config import Eagle3Config
from models.drafts.registry import build_draft
from models.drafts.vocabulary import DraftVocabulary
from models.run import Run
from models.targets.weights import read_target_head
from models.training.checkpoint import AVERAGED, DRAFT, VOCABULARY, DraftDescription, read_tensors

WEIGHTS = "model.safetensors"
MAPS = ("d2t", "t2d")


def export_checkpoint(checkpoint: Path, target: Path, folder: Path, extra: dict[str, Any]) -> ExportRecord:
    """Write the averaged weights of `checkpoint` as a Hugging Face folder, and read it back once.

    `extra` goes into `config.json` under `draftsmith` (licence, revisions). Raises ValueError where the export would
    not load: other tensor names or shapes.
    """
    description: DraftDescription = DraftDescription.read(checkpoint / DRAFT)
    config = Eagle3Config.model_validate(description.config)
    tensors = read_tensors(checkpoint, AVERAGED)
    vocabulary = DraftVocabulary(tensors.pop(VOCABULARY), description.target_vocab_size)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    save_file({**tensors, "d2t": vocabulary.d2t, "t2d": vocabulary.t2d}, folder / WEIGHTS)
    hidden_size = tensors["norm.weight"].shape[0]
    settings = engine_config(config, description, hidden_size) | {"draftsmith": extra | {"draft": description.config}}
    write_atomically(folder / "config.json", json.dumps(settings, indent=2) + "\n")
    reloaded = load_draft(folder, target, torch.float32).state_dict()
    for name, tensor in tensors.items():
        if not torch.equal(reloaded[name], tensor.float()):
            raise ValueError(f"export of {checkpoint} does not read back: {name} differs")
    return ExportRecord(
        path=str(folder), layout="sglang", sha256={p.name: sha256_file(p) for p in sorted(folder.iterdir())}
    )


def engine_config(config: Eagle3Config, description: DraftDescription, hidden_size: int) -> dict[str, Any]:
    """`config.json` as SGLang reads it."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "target_hidden_size": hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": 131072,
        "vocab_size": description.target_vocab_size,
        "draft_vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "num_aux_hidden_states": len(description.aux_layer_ids),
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(description.aux_layer_ids),
        },
    }


def load_draft(folder: Path, target: Path, dtype: torch.dtype, device: str | torch.device = "cpu") -> Draft:
    """Load an exported draft for decoding with the target in `target` (whose embeddings it shares).

    Raises ValueError, naming the tensors, for a folder that is not a whole export.
    """
    if not (folder / "config.json").is_file() or not (folder / WEIGHTS).is_file():
        raise ValueError(f"{folder} is not an exported draft: it needs config.json and {WEIGHTS}")
    settings = json.loads((folder / "config.json").read_text())
    if settings.get("architectures") != ["LlamaForCausalLMEagle3"]:
        raise ValueError(f"{folder} holds {settings.get('architectures')}, not an EAGLE-3 draft in SGLang's layout")
    tensors = load_file(folder / WEIGHTS)
    if "d2t" not in tensors:
        raise ValueError(f"{folder}/{WEIGHTS} has no vocabulary map d2t: export the draft again")
    vocabulary = DraftVocabulary.from_offsets(tensors["d2t"], settings["vocab_size"])
    config = Eagle3Config(
        vocab_size=settings["draft_vocab_size"],
        num_heads=settings["num_attention_heads"],
        num_kv_heads=settings["num_key_value_heads"],
        head_dim=settings["head_dim"],
        intermediate_size=settings["intermediate_size"],
        rope_theta=settings["rope_theta"],
        rms_norm_eps=settings["rms_norm_eps"],
        fc_norm=bool(settings.get("fc_norm")),
        norm_output=bool(settings.get("norm_output")),
    )
    embedding = read_target_head(target, dtype).embedding
    if len(embedding) != settings["vocab_size"]:
        raise ValueError(
            f"{folder} belongs to a target with {settings['vocab_size']} tokens, {target} has {len(embedding)}"
        )
    draft = build_draft(config, embedding, vocabulary, settings["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
    weights = {name: tensor for name, tensor in tensors.items() if name not in MAPS}
    expected = {name: tensor.shape for name, tensor in draft.state_dict().items()}
    found = {name: tensor.shape for name, tensor in weights.items()}
    if found != expected:
        wrong = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name))
        raise ValueError(f"{folder}/{WEIGHTS} has missing, unknown or misshapen tensors: {', '.join(wrong)}")
    draft.load_state_dict(weights)
    return draft.to(device, dtype).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    run = Run.open(parser.parse_args().run)
    result: TrainingResult = TrainingResult.read(run.folder.training)
    extra = {
        "target": run.target.name,
        "target_revision": run.target.revision,
        "target_licence": run.target.licence,
        "dataset_hash": run.samples.dataset_hash,
        "run": run.folder.name,
        "step": result.steps,
    }
    record = export_checkpoint(run.folder.path / result.checkpoint, Path(run.target.path), run.folder.export, extra)
    write_atomically(run.folder.path / "export.json", record)
    print(f"exported the draft of step {result.steps} to {record.path}", flush=True)


if __name__ == "__main__":
    run_main(main)
