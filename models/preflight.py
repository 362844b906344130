"""What would only fail after GPUs were taken, asked before. Runs at the end of `models.data.prepare`."""

import shutil

import torch

from infra.ledger.schema import check_server
from infra.planner.traffic import CHECKPOINT_BYTES_PER_PARAMETER
from infra.records.data_path import TargetRecord
from infra.refusal import Refusal
from infra.sglang.environment import sglang_python
from infra.transport.mooncake.environment import check_mooncake, choose_protocol
from infra.transport.stored import local_folder
from models.config.recipe import RunConfig
from models.data.prompts import suite_prompts, take_prompts
from models.drafts.base import Draft
from models.drafts.registry import build_draft
from models.drafts.vocabulary import DraftVocabulary
from models.run import Run, TargetReady
from models.training.start import load_start


def check_run(run: Run) -> None:
    """Raise Refusal, with the remedy, for a run that could not train, save, or be measured."""
    check_settings(run)
    _check_store(run)
    benchmark, heldout = run.config.benchmark, run.open_samples("heldout")
    take_prompts(
        ((heldout[i].tokens, heldout[i].loss_mask) for i in range(len(heldout))),
        benchmark.prompts,
        benchmark.prompt_tokens,
    )


def check_settings(run: TargetReady) -> None:
    """The part of `check_run` that needs no samples, so that it can come before text is regenerated."""
    config, target = run.config, run.target
    if config.generator.engine == "sglang":
        sglang_python()
    if config.transport.kind == "mooncake":
        check_mooncake()
        choose_protocol(config.transport.protocol)
    if config.ledger.url is not None:
        check_server(config.ledger.url)
    draft = _draft(config, target)
    _check_disk(run, sum(parameter.numel() for parameter in draft.parameters()))
    served = config.generator.engine == "sglang" and config.benchmark.served_concurrency
    if served and draft.engine_config() is not None:
        config.draft.engine_arguments(config.benchmark.lookahead)
    if run.folder.start.is_dir():
        load_start(run)
    for suite in config.promotion.suites:
        suite_prompts(run, suite)


def _draft(recipe: RunConfig, target: TargetRecord) -> Draft:
    """The draft, built without memory; whatever it refuses is refused here."""
    config = recipe.draft
    size = config.vocabulary_size(target.vocab_size)
    if size > target.vocab_size:
        raise Refusal(
            f"draft.vocab_size {size} exceeds the target's vocabulary of {target.vocab_size} tokens: "
            f"set it to at most {target.vocab_size}"
        )
    vocabulary = DraftVocabulary(torch.arange(size), target.vocab_size)
    with torch.device("meta"):
        embedding = torch.empty(target.vocab_size, target.hidden_size)
        return build_draft(config, embedding, vocabulary, recipe.target.aux_layer_ids)


def _check_store(run: Run) -> None:
    """Kept hidden states fill disks: said, with the numbers, before the first is captured."""
    settings = run.config.transport
    folder = local_folder(settings.folder) if settings.kind == "stored" and settings.folder else None
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    needed = run.samples.train_tokens * run.layout.bytes_per_token
    there, free = sum(file.stat().st_size for file in folder.iterdir()), shutil.disk_usage(folder).free
    if free + there < needed:
        raise Refusal(
            f"transport.kind=stored: {run.samples.train_tokens:,} tokens x {run.layout.bytes_per_token} bytes are "
            f"{needed / 2**30:.1f} GiB of hidden states, and {folder} has {free / 2**30:.1f} GiB free: stream them "
            "(transport.kind=auto), lower data.max_samples, or name another transport.folder"
        )


def _check_disk(run: TargetReady, parameters: int) -> None:
    # One more than are kept: a new checkpoint is whole before the oldest goes. The export and its copies in the
    # registry take less than another one.
    kept = run.config.training.keep_checkpoints
    needed = (kept + 2) * parameters * CHECKPOINT_BYTES_PER_PARAMETER
    free = shutil.disk_usage(run.folder.path).free
    if free < needed:
        raise Refusal(
            f"the disk of {run.folder.path} has {free / 2**30:.1f} GiB free, and {kept} "
            f"checkpoints of a draft with {parameters / 1e6:.0f} million parameters, with its export, take "
            f"{needed / 2**30:.1f} GiB: free some, put runs elsewhere ($DRAFTSMITH_RUNS), or lower "
            "training.keep_checkpoints"
        )
