"""The trainer: ranks that read hidden states and step the draft.

`python -m models.training.launch RUN` starts `python -m models.training.trainer RUN`, one process per rank. Rank 0
resumes the run in the ledger, plans every step, writes checkpoints and commits them.
"""

import argparse
import logging
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.callbacks import Callback
from sqlalchemy.exc import DBAPIError

from infra.data_plane.watch import StallError
from infra.files.atomic import write_atomically
from infra.ledger.ledger import Ledger
from infra.ledger.rounds import free_consumed
from infra.ledger.trainers import Resume
from infra.processes.exit import die_with_parent, end_well, run_main
from infra.quantities import duration, plural
from infra.records.data_path import TrainingResult
from infra.refusal import Refusal
from infra.transport.base import TransferError
from infra.transport.choice import sweep
from models import checkpoint as checkpoints
from models.checkpoint import SAVE_S
from models.devices import compute_device, limit_memory
from models.dtypes import DTYPES
from models.fused import compiles
from models.run import PreparedRun
from models.targets.weights import read_target_head
from models.training.control import Control
from models.training.heldout import HeldoutWalk
from models.training.learning_curve import more_data
from models.training.lightning_module import DraftModule
from models.training.progress import ProgressReporter
from models.training.sharding import strategy, whole
from models.training.start import first_draft, restore, take_over, target_projection
from models.training.stream import MicroBatch, StepStream

MACHINE_FAULTS = (DBAPIError, OSError, StallError, TransferError)
"""What ends a trainer without being the fault of the step that it trains, so that `RepeatedCrash` does not count it.
Restarts are bounded all the same (infra.processes.keep_running)."""


def open_trainer(run: PreparedRun, control: Control) -> "DraftTrainer":
    """Assemble this rank's trainer. Rank 0 takes over the run; every rank learns where it resumes."""
    settings, ledger = run.config.training, run.open_ledger()
    resume = control.decide(take_over(run, ledger) if control.rank == 0 else None, Resume)
    assert resume is not None
    total_steps = settings.total_steps(run.samples.train_samples)
    head = read_target_head(Path(run.target.path), torch.float32)
    draft, token_coverage = first_draft(run, head)
    resumed = restore(run.folder.path / resume.checkpoint.path, draft) if resume.checkpoint else None
    counters = resumed.state["counters"] if resumed else None
    draft.hold_embeddings(DTYPES[run.config.training_dtype])
    projection = target_projection(run, head, draft)
    module = DraftModule(draft, projection, settings, total_steps, control.world, resumed)
    stream = StepStream(run, control, ledger, resume, draft.positions)
    return DraftTrainer(
        run=run,
        control=control,
        ledger=ledger,
        resume=resume,
        module=module,
        stream=stream,
        progress=ProgressReporter(run, ledger, control, stream.times, draft.positions, counters),
        heldout=HeldoutWalk(run, draft, divided=settings.sharded and control.world > 1 and control.rank == 0),
        saver=checkpoints.CheckpointSaver(run.folder, ledger, resume.incarnation, settings.keep_checkpoints),
        token_coverage=token_coverage,
    )


@dataclass(eq=False)
class DraftTrainer(Callback):
    """One rank's training loop; Lightning calls it after every micro-batch."""

    run: PreparedRun
    control: Control
    ledger: Ledger
    resume: Resume
    module: DraftModule
    stream: StepStream
    progress: ProgressReporter
    heldout: HeldoutWalk
    saver: checkpoints.CheckpointSaver
    token_coverage: float
    """Share of the supervised tokens that the draft vocabulary covers."""

    def __post_init__(self) -> None:
        self.step = self.committed = self.resume.checkpoint.step if self.resume.checkpoint else 0

    def fit(self) -> TrainingResult | None:
        """Train to the end of the last epoch, or `max_steps`; the final checkpoint is committed.

        Where generators and trainer alternate, only to the end of what is captured. None, and on all ranks but the
        first, unless the run is finished.
        """
        settings, world = self.run.config.training, self.control.world
        trainer = lightning.Trainer(
            accelerator="cpu" if compute_device().type == "cpu" else "gpu",
            devices=self.control.local_world,
            num_nodes=world // self.control.local_world,
            strategy=strategy(settings, world),
            plugins=[LightningEnvironment()],  # named, because inside a Slurm job Lightning would take Slurm's
            max_epochs=1,  # a stream of unknown length never ends without it
            accumulate_grad_batches=settings.micro_batches,
            precision="bf16-mixed" if self.run.config.training_dtype == "bfloat16" else "32-true",
            callbacks=[self],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        trainer.fit(self.module, train_dataloaders=self.stream)
        if self.step == 0 and self.stream.finished:
            raise Refusal("nothing was trained, because every sample is quarantined: see logs/generator-*.log")
        self._report()
        self._commit()
        self.saver.wait()
        self.control.wait_for_all()
        peak = self.control.greatest(torch.cuda.max_memory_allocated()) or None
        if self.control.rank == 0 and self.run.sharing.mode == "alternate":
            self._end_turn()
        return self._finish(peak) if self.control.rank == 0 and self.stream.finished else None

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: MicroBatch, batch_idx: int
    ) -> None:
        """After each optimizer step, average the weights; report, measure and write a checkpoint when due."""
        self.progress.add(self.module.outcome)
        if not batch.last_of_step:
            return
        self.step, settings = batch.step, self.run.config.training
        self.module.average(self.step)
        self.progress.step_done(batch.step_tokens, self.module.gradient_norm)
        if self.heldout.due(self.step):
            self.progress.check_finite(self.step)
            averaged = whole(self.module.averaged, wanted=self.control.rank == 0)
            if self.control.rank == 0:
                self.progress.heldout = self.heldout.measure(averaged, self.module.device)
        if self.step % settings.log_steps == 0:
            self._report()
        if self.step % settings.checkpoint_steps == 0:
            self._commit()

    def _report(self) -> None:
        rate = self.module.trainer.optimizers[0].param_groups[0]["lr"]
        self.progress.report(self.step, rate)

    def _commit(self) -> None:
        """Begin to save and commit the checkpoint of the present step; all ranks put together what they divide."""
        if self.step == self.committed:
            return
        self.progress.check_finite(self.step)
        self.committed = self.step
        module, run, wanted = self.module, self.run, self.control.rank == 0
        self.saver.wait_in_training()  # before another copy of everything is in the host's memory
        weights, averaged = whole(module.draft.state_dict(), wanted), whole(module.averaged, wanted)
        state = module.state(self.progress.counters(), wanted)
        if not wanted:
            return
        weights |= {checkpoints.VOCABULARY: module.draft.vocabulary.target_ids}
        self.saver.save(
            self.step,
            {checkpoints.WEIGHTS: weights, checkpoints.AVERAGED: weights | averaged},
            state,
            checkpoints.DraftDescription(
                config=run.config.draft.model_dump(),
                aux_layer_ids=run.config.target.aux_layer_ids,
                target_vocab_size=module.draft.vocabulary.target_size,
            ),
        )

    def _finish(self, peak_gpu_bytes: int | None) -> TrainingResult:
        progress, totals = self.progress, self.progress.totals
        result = TrainingResult(
            steps=self.step,
            tokens=int(totals["tokens"]),
            wall_s=totals["trained_s"],
            data_wait_s=totals["waited_s"],
            checkpoint=self.ledger.checkpoints()[-1].path,
            final_loss=progress.loss,
            acceptance_by_position=tuple(progress.acceptance),
            vocabulary_coverage=totals["covered"] / max(1, totals["supervised"]),
            token_coverage=self.token_coverage,
            checkpoint_stall_s=self.saver.stall_s / max(1, self.saver.saves),
            peak_gpu_bytes=peak_gpu_bytes,
            rates=progress.rates(),
            more_data=more_data(self.run.folder.metrics, self.run.config.training),
        )
        write_atomically(self.run.folder.training, result)
        self.ledger.finish(self.resume.incarnation)
        return result

    def _end_turn(self) -> None:
        """Free what this turn has trained; the process ends, which is no crash."""
        free_consumed(self.ledger, self.resume.incarnation)
        sweep(self.run.open_transport(), self.ledger.held_keys)
        self.ledger.excuse(self.resume.incarnation)


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
    control = Control(run.config.training.context_parallel_size, wait_s=2 * run.config.stall_s + SAVE_S)
    limit_memory(run.sharing.trainer_bytes)
    train(run, control)
    control.close()
    end_well()


def train(run: PreparedRun, control: Control) -> None:
    """Train on this rank from where the run stands."""
    started = time.monotonic()
    trainer = open_trainer(run, control)
    if control.rank == 0:
        print(f"trainer ready after {time.monotonic() - started:.1f} s: {trainer.module.total_steps} steps", flush=True)
        print(f"samples arrive {trainer.stream.fetcher.words}", flush=True)
        if compiles(compute_device()):
            print("the first steps compile kernels for this GPU, which takes them longer", flush=True)
    try:
        result = trainer.fit()
    except MACHINE_FAULTS:
        trainer.ledger.excuse(trainer.resume.incarnation)
        raise
    if result is not None:
        done = f"{plural(result.steps, 'step')} on {plural(result.tokens, 'token')} in {duration(result.wall_s)}"
        print(f"trained {done}", flush=True)


if __name__ == "__main__":
    run_main(main)
