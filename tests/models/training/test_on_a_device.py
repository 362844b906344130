"""A whole training on the emulated accelerator, checkpoints and resume included."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from emulated_device import DEVICE, emulated_device
from lightning.pytorch.accelerators.accelerator import Accelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from safetensors.torch import load_file

from infra.files.run_folder import RunFolder
from models import checkpoint as checkpoints
from models.capture import plain_engine
from models.config.eagle3 import Eagle3Config
from models.config.training import TrainingConfig
from models.drafts.base import TargetProjection
from models.drafts.eagle3.module import Eagle3Draft
from models.drafts.vocabulary import DraftVocabulary
from models.run import PreparedRun
from models.training import start as training_start
from models.training import trainer
from models.training.control import Control
from models.training.heldout import HeldoutWalk
from models.training.lightning_module import DraftModule

SHORT = ("data.max_samples=12", "data.max_tokens=48", "training.max_steps=4", "training.log_steps=2")
OFTEN = ("training.heldout_steps=2", "training.checkpoint_steps=2", "benchmark.prompts=4", "benchmark.prompt_tokens=16")


class EmulatedAccelerator(Accelerator):
    """What Lightning asks of a kind of device."""

    def setup_device(self, device: torch.device) -> None:
        assert device == DEVICE

    def teardown(self) -> None:
        pass

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [DEVICE] * devices

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def name() -> str:
        return "emulated"


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The data plane's processes find the emulated device where they would find a GPU."""
    for module in (training_start, trainer, plain_engine):
        monkeypatch.setattr(module, "compute_device", lambda: DEVICE)
    on_device = SingleDeviceStrategy(DEVICE, accelerator=EmulatedAccelerator())

    def make(*, accelerator: str, devices: int, strategy: str, **options: Any) -> lightning.Trainer:
        assert (accelerator, devices, strategy) == ("gpu", 1, "auto")
        return Trainer(strategy=on_device, **options)

    Trainer = lightning.Trainer
    monkeypatch.setattr(lightning, "Trainer", make)


def averaged_weights(folder: RunFolder) -> dict[str, torch.Tensor]:
    newest = max(folder.checkpoints.iterdir())
    return load_file(newest / checkpoints.AVERAGED)


METHODS = {
    "eagle3": (),
    "eagle3, float8": ("generator.stored_dtype=float8",),
    "eagle3, Muon": ("training.optimizer=muon",),
    "dflash": ('draft={"method":"dflash","block_size":4,"anchors":8,"num_heads":6,"num_kv_heads":3,"head_dim":32,'
               '"intermediate_size":64,"layer_types":["full_attention"]}', "benchmark.lookahead=3"),
    "domino": ('draft={"method":"domino","block_size":4,"anchors":8,"num_heads":6,"num_kv_heads":3,"head_dim":32,'
               '"intermediate_size":64,"layer_types":["full_attention"],"gru_hidden_dim":24,"emb_dim":16}',
               "benchmark.lookahead=3"),
    "medusa": ('draft={"method":"medusa","heads":2,"vocab_size":512}', "benchmark.lookahead=2"),
}  # fmt: skip


@pytest.mark.parametrize(
    "method", [name if name == "eagle3" else pytest.param(name, marks=pytest.mark.long) for name in METHODS]
)
def test_a_training_on_a_device_follows_one_on_the_cpu(
    make_run, start, finished_run, accelerator, capsys, monkeypatch, method
) -> None:
    """Progress, held-out walk, checkpoints, and a crash from which it resumes."""
    overrides = (*SHORT, *OFTEN, *METHODS[method])
    expected, folder = averaged_weights(finished_run(*overrides)), make_run("run", *overrides)
    generator = start("models.capture.generator", folder)
    step, crashes = DraftModule.training_step, [3]

    def perhaps_crash(self: DraftModule, batch: Any, index: int) -> Any:
        assert {p.device for p in self.parameters()} == {batch.samples.aux.device} == {DEVICE}
        if batch.step in crashes:
            crashes.remove(batch.step)
            raise KeyError("a crash")
        return step(self, batch, index)

    monkeypatch.setattr(DraftModule, "training_step", perhaps_crash)

    with emulated_device():
        crashed = trainer.open_trainer(PreparedRun.open(folder.path), Control())
        with pytest.raises(KeyError, match="a crash"):
            crashed.fit()
        crashed.saver.wait()  # it would have ended with its process
        resumed = trainer.open_trainer(PreparedRun.open(folder.path), Control())
        assert resumed.step == 2
        assert resumed.fit().steps == 4
    generator.communicate(timeout=120)
    assert "step 4/4" in capsys.readouterr().out
    for name, weight in averaged_weights(folder).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-3, atol=1e-4)


def test_a_draft_is_told_how_much_of_its_training_is_done(make_run, start, accelerator, monkeypatch) -> None:
    """Domino's loss changes by it, and blocks are drawn by the epoch. A resumed second half goes on from there."""
    epochs = ("training.samples_per_step=6", "training.epochs=2", "training.checkpoint_steps=2")
    folder, shares = make_run("run", *SHORT, *METHODS["domino"], *epochs), list[tuple[int, float]]()
    generator, step = start("models.capture.generator", folder), DraftModule.training_step

    def note(self: DraftModule, batch: Any, index: int) -> Any:
        loss = step(self, batch, index)
        shares.append((self.draft.epoch, self.draft.trained_share))
        if len(shares) == 3:
            raise KeyError("a crash")
        return loss

    monkeypatch.setattr(DraftModule, "training_step", note)
    with emulated_device():
        crashed = trainer.open_trainer(PreparedRun.open(folder.path), Control())
        with pytest.raises(KeyError, match="a crash"):
            crashed.fit()
        crashed.saver.wait()
        assert trainer.open_trainer(PreparedRun.open(folder.path), Control()).fit().steps == 4
    generator.communicate(timeout=120)
    assert shares == [(0, 0.0), (0, 0.25), (1, 0.5), (1, 0.5), (1, 0.75)]


@pytest.mark.parametrize(
    "method", [name if name == "eagle3" else pytest.param(name, marks=pytest.mark.long) for name in METHODS]
)
def test_the_host_hardly_waits_for_the_device(make_run, start, accelerator, monkeypatch, method) -> None:
    """From one micro-batch to the next: optimizer, averages and a progress line too, but no checkpoint."""
    folder = make_run("run", *SHORT, *METHODS[method], "training.micro_batches=2")
    generator = start("models.capture.generator", folder)
    step, waits, copies = DraftModule.training_step, [], []

    with emulated_device() as traffic:

        def count(self: DraftModule, batch: Any, index: int) -> Any:
            waits.append(dict(traffic.waits))
            copies.extend(traffic.to_host)
            traffic.clear()
            return step(self, batch, index)

        monkeypatch.setattr(DraftModule, "training_step", count)
        trainer.open_trainer(PreparedRun.open(folder.path), Control()).fit()
    generator.communicate(timeout=120)
    assert len(waits) == 8
    assert max(sum(found.values()) for found in waits[2:]) <= 3, waits
    assert max(copies, default=0) <= 2**20


def test_the_plain_engine_captures_on_a_device(make_run, accelerator) -> None:
    """Its canary passes, and what it captures lies on the host, as on the CPU."""
    run = PreparedRun.open(make_run("run", *SHORT).path)
    tokens = run.open_samples()[0].tokens
    expected = plain_engine.TargetModel.load(
        Path(run.target.path), run.config.target.aux_layer_ids, torch.float32
    ).forward(tokens[None])
    with emulated_device():
        engine = plain_engine.PlainEngine(run)
        assert engine.target.device == DEVICE
        engine.check_canary(tokens)
        record = engine.capture("run/0/0/1", tokens).record
    captured = run.layout.empty(len(tokens))
    engine.transport.get(record, run.layout.views(captured))
    torch.testing.assert_close(captured.aux, expected.aux[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(captured.last, expected.last[0], rtol=1e-4, atol=1e-4)


def tensors_on_the_device() -> int:
    gc.collect()
    return sum(isinstance(found, torch.Tensor) and found.device == DEVICE for found in gc.get_objects())


@pytest.fixture
def small_draft() -> Eagle3Draft:
    config = Eagle3Config(vocab_size=64, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=32, ttt_steps=2)
    return Eagle3Draft(config, torch.randn(128, 32), DraftVocabulary(torch.arange(64), 128), (0, 1, 2))


def test_the_copy_of_a_divided_draft_holds_nothing_on_the_device_but_what_is_measured(
    small_draft: Eagle3Draft, make_run: Callable[..., RunFolder]
) -> None:
    walk = HeldoutWalk(PreparedRun.open(make_run("run", *OFTEN).path), small_draft, divided=True)
    with emulated_device():
        trained = small_draft.to(DEVICE)
        before = tensors_on_the_device()
        walk.measure({name: weight.detach().cpu() for name, weight in trained.named_parameters()}, DEVICE)
        assert tensors_on_the_device() == before


def test_a_restored_checkpoint_leaves_the_host_once_it_is_on_the_device(small_draft: Eagle3Draft) -> None:
    with emulated_device():
        draft = small_draft.to(DEVICE)
        projection = TargetProjection(torch.randn(64, 32, device=DEVICE), None, 1.0, None)
        first = DraftModule(draft, projection, TrainingConfig(), 100)
        configured = first.configure_optimizers()
        for parameter in draft.parameters():
            parameter.grad = torch.ones_like(parameter)
        configured["optimizer"].step()
        state = {"optimizer": configured["optimizer"].state_dict()}
        state |= {"scheduler": configured["lr_scheduler"]["scheduler"].state_dict(), "counters": {}}
        restored = checkpoints.Restored(checkpoints.on_host(first.averaged), checkpoints.on_host(state))
        alive = [weakref.ref(tensor) for tensor in restored.averaged.values()]
        second = DraftModule(draft, projection, TrainingConfig(), 100, resumed=restored)
        del restored
        second.configure_optimizers()
        assert not any(tensor() is not None for tensor in alive)
