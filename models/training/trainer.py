"""The trainer: ranks that read hidden states and step the draft.

`python -m models.training.launch RUN` starts `python -m models.training.trainer RUN`, one process per rank. Rank 0
resumes the run in the ledger, plans every step, writes checkpoints and commits them.
"""

import argparse
import logging
import time
import warnings
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.callbacks import Callback
from sqlalchemy.exc import DBAPIError

from infra.data_plane.bottleneck import StallError
from infra.files.atomic import write_atomically
from infra.ledger.answers import Resume
from infra.ledger.ledger import Ledger
from infra.processes.exit import die_with_parent, run_main
from infra.records.data_path import TrainingResult
from infra.refusal import Refusal
from infra.transport.base import TransferError
from models import checkpoint as checkpoints
from models.drafts.base import Draft, TargetProjection
from models.drafts.registry import build_draft
from models.drafts.vocabulary import DraftVocabulary
from models.dtypes import DTYPES
from models.run import PreparedRun
from models.targets.weights import TargetHead, read_target_head
from models.training.control import Control
from models.training.heldout import HeldoutWalk
from models.training.lightning_module import DraftModule
from models.training.progress import ProgressReporter
from models.training.saving import CheckpointSaver
from models.training.sharding import strategy, whole
from models.training.start import load_start
from models.training.stream import MicroBatch, StepStream
from models.training.takeover import take_over

MACHINE_FAULTS = (DBAPIError, OSError, StallError, TransferError)
"""What ends a trainer without being the fault of the step that it trains, so that `RepeatedCrash` does not count it.
Restarts are bounded all the same (infra.processes.keep_running)."""


class StepEnd(Callback):
    """After each optimizer step: average the weights, report, and write a checkpoint when one is due."""

    def __init__(self, trainer: "DraftTrainer"):
        self.owner = trainer

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: MicroBatch, batch_idx: int
    ) -> None:
        self.owner.micro_batch_done(batch)


class DraftTrainer:
    """One rank's training of one run."""

    def __init__(self, run: PreparedRun, control: Control):
        self.run, self.control, self.settings = run, control, run.config.training
        self.ledger: Ledger = run.open_ledger()
        self.resume = self._resume()
        self.step = self.committed = self.resume.checkpoint.step if self.resume.checkpoint else 0
        self.saver = CheckpointSaver(run.folder, self.ledger, self.resume.incarnation, self.settings.keep_checkpoints)
        self.total_steps = self.settings.total_steps(run.samples.train_samples)
        head = read_target_head(Path(run.target.path), torch.float32)
        draft = self._build(head)
        resumed = self._restore(draft)
        projection = self._projection(head, draft)
        self.module = DraftModule(draft, projection, self.settings, self.total_steps, control.world, resumed)
        if resumed is not None:
            averaged = checkpoints.read_tensors(self._checkpoint_path(), checkpoints.AVERAGED)
            self.module.averaged = {name: averaged[name] for name in self.module.averaged}
        self.stream = StepStream(run, control, self.ledger, self.resume, self.step + 1, draft.positions)
        self.progress = ProgressReporter(run.folder, self.ledger, control, self.stream, self.total_steps)
        self.heldout = HeldoutWalk(run, draft, self.settings.sharded and control.world > 1)
        if resumed is not None:
            self.progress.restore(resumed.counters)

    def fit(self) -> TrainingResult:
        """Train to the end of the last epoch, or `max_steps`; the final checkpoint is committed."""
        trainer = lightning.Trainer(
            accelerator="gpu" if torch.cuda.is_available() else "cpu",
            devices=self.control.world,
            strategy=strategy(self.settings, self.control.world),
            plugins=[LightningEnvironment()],  # named, because inside a Slurm job Lightning would take Slurm's
            max_epochs=1,  # a stream of unknown length never ends without it
            accumulate_grad_batches=self.settings.micro_batches,
            precision="bf16-mixed" if self.settings.precision == "bfloat16" else "32-true",
            callbacks=[StepEnd(self)],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        trainer.fit(self.module, train_dataloaders=self.stream)
        if self.step == 0:
            raise Refusal("there was nothing to train: every sample is quarantined; see logs/generator-*.log")
        self._report()
        self._commit()
        self.saver.wait()
        self.control.wait_for_all()
        return self._finish()

    def micro_batch_done(self, batch: MicroBatch) -> None:
        self.progress.add(self.module.outcome)
        if not batch.last_of_step:
            return
        self.step = batch.step
        self.module.average(self.step)
        self.progress.step_done(batch.step_tokens)
        if self.heldout.due(self.step):
            averaged = whole(self.module.averaged)
            if self.control.rank == 0:
                self.progress.heldout_length = self.heldout.measure(averaged, self.module.device)
        if self.step % self.settings.log_steps == 0:
            self._report()
        if self.step % self.settings.checkpoint_steps == 0:
            self._commit()

    def _report(self) -> None:
        rate = self.module.trainer.optimizers[0].param_groups[0]["lr"]
        self.progress.report(self.step, rate, self.module.draft.positions)

    def _resume(self) -> Resume:
        """Rank 0 takes over the run; every rank learns where it resumes."""
        is_first, transport = self.control.rank == 0, self.run.open_transport
        resume = self.control.decide(take_over(self.run, self.ledger, transport()) if is_first else None, Resume)
        assert resume is not None
        return resume

    def _build(self, head: TargetHead) -> Draft:
        torch.manual_seed(self.run.config.seed)
        samples = self.run.open_samples()
        supervised = samples.tokens[samples.loss_mask.bool()].long()
        counts = torch.bincount(supervised, minlength=len(head.embedding))
        if len(counts) > len(head.embedding):
            raise Refusal(
                f"the samples hold token {len(counts) - 1}, the target knows {len(head.embedding)}: they were made for "
                "another tokenizer; prepare them again"
            )
        config = self.run.config.draft
        if self.run.folder.start.is_dir():
            draft = load_start(self.run)
        else:
            vocabulary = DraftVocabulary.by_frequency(counts, config.vocabulary_size(len(counts)))
            draft = build_draft(config, head.embedding, vocabulary, self.run.config.target.aux_layer_ids)
            draft.start_from(head.head)
        self.token_coverage = float(counts[draft.vocabulary.target_ids].sum() / counts.sum())
        return draft

    def _restore(self, draft: Draft) -> checkpoints.TrainerState | None:
        if self.resume.checkpoint is None:
            return None
        path = self._checkpoint_path()
        tensors = checkpoints.read_tensors(path, checkpoints.WEIGHTS)
        if not torch.equal(tensors.pop(checkpoints.VOCABULARY), draft.vocabulary.target_ids):
            raise Refusal(f"{path} has another draft vocabulary than the samples now give: start a new run")
        draft.load_state_dict(tensors)
        return checkpoints.read_state(path)

    def _checkpoint_path(self) -> Path:
        assert self.resume.checkpoint is not None
        return self.run.folder.path / self.resume.checkpoint.path

    def _projection(self, head: TargetHead, draft: Draft) -> TargetProjection:
        device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
        weight = head.head.to(device, DTYPES[self.settings.precision])
        return TargetProjection(
            rows=weight[draft.vocabulary.target_ids.to(device)],
            full=weight if self.settings.out_of_vocabulary == "argmax" else None,
            logit_scale=head.logit_scale,
            soft_cap=head.soft_cap,
        )

    def _commit(self) -> None:
        """Begin to save and commit the checkpoint of the present step; all ranks put together what they divide."""
        if self.step == self.committed:
            return
        self.committed = self.step
        module, run = self.module, self.run
        weights, averaged = whole(module.draft.state_dict()), whole(module.averaged)
        state = module.state(self.progress.counters())
        if self.control.rank:
            return
        weights |= {checkpoints.VOCABULARY: module.draft.vocabulary.target_ids}
        self.saver.save(
            self.step,
            {checkpoints.WEIGHTS: weights, checkpoints.AVERAGED: weights | averaged},
            state,
            checkpoints.DraftDescription(
                config=run.config.draft.model_dump(),
                aux_layer_ids=run.config.target.aux_layer_ids,
                target_path=run.target.path,
                target_revision=run.target.revision,
                target_vocab_size=module.draft.vocabulary.target_size,
            ),
        )

    def _finish(self) -> TrainingResult:
        result = TrainingResult(
            steps=self.step,
            tokens=self.progress.tokens,
            wall_s=self.progress.trained_s,
            data_wait_s=self.progress.waited_s,
            step_s=self.progress.trained_s,
            checkpoint=self.ledger.checkpoints()[-1].path,
            final_loss=self.progress.loss,
            acceptance_by_position=tuple(self.progress.acceptance),
            vocabulary_coverage=self.progress.covered / max(1, self.progress.supervised),
            token_coverage=self.token_coverage,
            checkpoint_stall_s=self.saver.stall_s / max(1, self.saver.saves),
            peak_gpu_bytes=self.control.greatest(torch.cuda.max_memory_allocated()) or None,
            rates=self.progress.rates(),
        )
        if self.control.rank == 0:
            write_atomically(self.run.folder.training, result)
            self.ledger.finish(self.resume.incarnation)
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--parent", type=int, required=True, help="process id of the launcher")
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")
    run = PreparedRun.open(arguments.run)
    if run.config.training.threads:
        torch.set_num_threads(run.config.training.threads)
    control = Control(run.config.training.context_parallel_size)
    started = time.monotonic()
    trainer = DraftTrainer(run, control)
    if control.rank == 0:
        print(f"trainer ready after {time.monotonic() - started:.1f} s: {trainer.total_steps} steps", flush=True)
        print(f"samples arrive {trainer.stream.fetcher.words}", flush=True)
    try:
        result = trainer.fit()
    except MACHINE_FAULTS:
        trainer.ledger.excuse(trainer.resume.incarnation)
        raise
    if control.rank == 0:
        print(f"trained {result.steps} steps on {result.tokens} tokens in {result.wall_s:.0f} s", flush=True)
    control.close()


if __name__ == "__main__":
    run_main(main)
