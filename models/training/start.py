"""How a trainer starts: it takes over its run, builds the draft, and restores the newest checkpoint."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from infra.ledger.ledger import Ledger
from infra.ledger.trainers import Resume, rebuild_run, resume_run
from infra.records.data_path import TargetRecord
from infra.refusal import Refusal
from infra.transport.choice import sweep
from models import checkpoint as checkpoints
from models.config.draft import DraftConfig
from models.devices import compute_device
from models.drafts.base import Draft, TargetProjection
from models.drafts.registry import build_draft
from models.drafts.vocabulary import DraftVocabulary
from models.dtypes import DTYPES
from models.export.sglang import load_draft
from models.run import PreparedRun, RunWithTarget
from models.targets.own_layer import OwnLayer
from models.targets.weights import TargetHead, tensor_files


def take_over(run: PreparedRun, ledger: Ledger) -> Resume:
    """Take the run over, and remove what no row of the ledger knows: objects, checkpoints, metrics of undone steps.

    A lost ledger is rebuilt from the newest whole checkpoint.
    """
    folder, transport = run.folder, run.open_transport()
    if not ledger.progress().total and not ledger.checkpoints() and (newest := checkpoints.newest_whole(folder)):
        record, manifest = newest
        rebuild_run(ledger, record, manifest.epoch, run.epoch_slots(manifest.epoch), manifest.consumed)
        print(f"the ledger was lost; it is rebuilt from the checkpoint of step {record.step}", flush=True)
    resume = resume_run(ledger, lambda record: checkpoints.is_whole(folder, record), transport.verify)
    for record in resume.dropped:
        print(f"checkpoint of step {record.step} ({record.path}) does not verify and is dropped", flush=True)
    sweep(transport, ledger.held_keys)
    checkpoints.remove_uncommitted(folder, ledger)
    checkpoints.rewind_metrics(folder, resume.checkpoint.step if resume.checkpoint else 0)
    return resume


def first_draft(run: PreparedRun, head: TargetHead) -> tuple[Draft, float]:
    """The draft before its first step, and the share of supervised tokens that its vocabulary covers."""
    torch.manual_seed(run.config.seed)
    samples, config = run.open_samples(), run.config.draft
    counts = torch.bincount(samples.supervised, minlength=len(head.embedding))
    if len(counts) > len(head.embedding):
        raise Refusal(
            f"the samples hold token {len(counts) - 1}, the target knows {len(head.embedding)}: they were made for "
            "another tokenizer; prepare them again"
        )
    if run.folder.start.is_dir():
        draft = load_start(run)
    else:
        vocabulary = DraftVocabulary.by_frequency(counts, config.vocabulary_size(len(counts)))
        draft = build_draft(config, head.embedding, vocabulary, run.config.target.aux_layer_ids)
        draft.start_from(head.head)
        place = Path(run.target.path)
        if own := draft.target_tensors(tensor_files(place)):
            OwnLayer.find(place, own).load(own)
    return draft, float(counts[draft.vocabulary.target_ids].sum() / counts.sum())


def _shape(config: DraftConfig, target: TargetRecord) -> dict[str, Any]:
    """What a draft is built from; sizes that follow the target are given as numbers."""
    found = config.model_dump(exclude=set(config.training_only))
    if "vocab_size" in found:
        found["vocab_size"] = config.vocabulary_size(target.vocab_size)
    if "hidden_size" in found:
        found["hidden_size"] = found["hidden_size"] or target.hidden_size
    return found


def load_start(run: RunWithTarget) -> Draft:
    """A warm start: the draft of another training in RUN/start, with its vocabulary, whose tokens its head's rows are.

    It may have been trained for another target of the same shapes: a fine-tuned target continues from the draft of its
    base. Raises Refusal for one of other shapes.
    """
    folder, named = run.folder.start, f"training.start_from={run.config.training.start_from}"
    try:
        draft = load_draft(folder, Path(run.target.path), torch.float32)
    except Refusal as error:
        raise Refusal(f"{named} does not fit {run.target.name}: {error}. Leave training.start_from out") from error
    wanted, given = (_shape(config, run.target) for config in (run.config.draft, draft.config))
    differing = [
        f"draft.{name} is {given.get(name)}, the recipe's {wanted.get(name)}"
        for name in {**wanted, **given}
        if given.get(name) != wanted.get(name)
    ]
    layers = run.config.target.aux_layer_ids
    if tuple(draft.aux_layer_ids) != tuple(layers):
        differing.append(f"target.aux_layer_ids are {list(draft.aux_layer_ids)}, the recipe's {list(layers)}")
    if differing:
        raise Refusal(
            f"{named}: that draft has another shape ({'; '.join(differing)}): take its settings over, or leave "
            "training.start_from out"
        )
    draft.config = run.config.draft
    return draft.train()


def restore(path: Path, draft: Draft) -> checkpoints.Restored:
    """Load a checkpoint's weights into `draft`, and read what else training resumes from."""
    weights = load_file(path / checkpoints.WEIGHTS)
    if not torch.equal(weights.pop(checkpoints.VOCABULARY), draft.vocabulary.target_ids):
        raise Refusal(f"{path} has another draft vocabulary than the samples now give: start a new run")
    draft.load_state_dict(weights)
    return checkpoints.read_restored(path)


def target_projection(run: PreparedRun, head: TargetHead, draft: Draft) -> TargetProjection:
    """The target's head on this rank's device, in the precision of the arithmetic."""
    device = compute_device()
    weight = head.head.to(device, DTYPES[run.config.training_dtype])
    return TargetProjection(
        rows=weight[draft.vocabulary.target_ids.to(device)],
        full=weight if run.config.whole_head(run.target.vocab_size) else None,
        logit_scale=head.logit_scale,
        soft_cap=head.soft_cap,
    )
