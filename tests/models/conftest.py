"""The recipe of the tiny target and its samples, which later sessions take from the cache."""

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.files.run_folder import RunFolder
from infra.ledger.ledger import Ledger
from infra.ledger.schema import LEASED, database_now, samples
from infra.records.data_path import SamplesRecord, TargetRecord
from infra.sglang.command import sglang_python
from models.config.recipe import RunConfig, load_recipe
from models.data.prepare import prepare_samples
from models.run import PreparedRun
from tests.conftest import memory_folder, prepare_run
from tests.models.seeing_targets import MEDUSA, MTP, SETTINGS, seeing_target, write_source

RECIPES = Path(__file__).parents[2] / "recipes"
KEEPER = Path(__file__).parents[1] / "kept_sglang.py"
HOLDER, HOLD_S = "the test", 3600.0


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Which tests ran before in this process, and drew, depends on how fast the other one is."""
    torch.manual_seed(0)


HoldBack = Callable[[RunFolder, range], AbstractContextManager[tuple[Ledger, Callable[[], None]]]]


@pytest.fixture
def kill_at_checkpoint(start: Callable[..., Any], kill_tree: Callable[[int], None]) -> Callable[..., None]:
    """Starts generator and trainer of a run, and kills both once the checkpoint of a step is there."""

    def kill(folder: RunFolder, step: int, ranks: int = 1) -> None:
        processes = start("models.capture.generator", folder), start("models.training.launch", folder, ranks=ranks)
        deadline = time.monotonic() + 300
        while not folder.checkpoint(step, 1).exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        for process in reversed(processes):
            kill_tree(process.pid)
            process.communicate(timeout=60)
        assert not folder.training.exists(), "killed too late"

    return kill


@pytest.fixture
def hold_back() -> HoldBack:
    """Holds samples of the first epoch back, by ordinal, until the context ends or they are released.

    Training stands still there, however late the test looks, in a run with `ledger.lease_seconds=3600`:
    `with hold_back(folder, range(24, 36)) as (ledger, release): ...`. Lightning trains a step once the next is there.
    """

    @contextmanager
    def hold(folder: RunFolder, ordinals: range) -> Iterator[tuple[Ledger, Callable[[], None]]]:
        run = PreparedRun.open(folder.path)
        assert run.config.ledger.lease_seconds == HOLD_S, "generators would take them when the lease has expired"
        with run.open_ledger() as ledger:
            ledger.open_epoch(None, 0, run.epoch_slots(0))
            with ledger.write() as (rows, _):
                held = {"state": LEASED, "owner": HOLDER, "lease_expires": database_now() + HOLD_S}
                assert rows.update(samples.c.ordinal.in_(list(ordinals)), **held) == len(ordinals)

            def release() -> None:
                ledger.give_back(HOLDER)

            yield ledger, release
            release()

    return hold


@pytest.fixture(scope="session")
def tiny_config() -> RunConfig:
    return load_recipe(RECIPES / "tiny.yaml")


@pytest.fixture(scope="session")
def tiny_samples(tiny_config: RunConfig, tiny_target: TargetRecord) -> SamplesRecord:
    return prepare_samples(tiny_config.data, tiny_target, tiny_config.target.add_bos)


@pytest.fixture(scope="session")
def _sglang_that_forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An environment whose Python forks from one that has imported SGLang; see tests/kept_sglang.py."""
    python, folder = sglang_python(), tmp_path_factory.mktemp("sglang")
    (folder / "lib").symlink_to(python.parents[1] / "lib")
    # A socket's path is short.
    place, stand_in = Path(tempfile.mkdtemp(dir="/tmp")) / "socket", folder / "bin" / "python"
    stand_in.parent.mkdir()
    ask = f"sys.path.append({str(KEEPER.parent)!r}); from kept_sglang import ask; sys.exit(ask({str(place)!r}))"
    stand_in.write_text(f"#!{sys.executable} -I\nimport sys; {ask}\n")
    stand_in.chmod(0o755)
    log = folder / "log"
    with (
        log.open("w") as file,
        subprocess.Popen([python, "-P", KEEPER, place], stdin=subprocess.PIPE, stdout=file, stderr=file) as keeper,
    ):  # which ends with its input
        deadline = time.monotonic() + 300
        while not place.exists():
            assert keeper.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield folder
    shutil.rmtree(place.parent)


@pytest.fixture(scope="module")
def sglang_that_forks(_sglang_that_forks: Path) -> Iterator[None]:
    """Programs of SGLang's environment start without importing SGLang once more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTSMITH_SGLANG", str(_sglang_that_forks))
        yield


@pytest.fixture
def seeing_run(tmp_path: Path, tiny_target: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes runs of a family's tiny target on conversations of which half hold an image."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    with memory_folder() as memory:
        monkeypatch.setenv("DRAFTSMITH_SHM", str(memory))

        def make(family: str, *overrides: str, draft: str = MEDUSA, conversations: int = 16) -> RunFolder:
            target = seeing_target(family, tmp_path / family, tiny_target.path)
            source = write_source(tmp_path, conversations)
            data = [f"data.source={source}", f"data.images={tmp_path / 'pictures'}"]
            if draft == MTP:
                data += ["target.source=huggingface", f"target.name={target.path}"]
            return prepare_run(tmp_path / "run", target, draft, *data, *SETTINGS, *overrides)

        yield make
