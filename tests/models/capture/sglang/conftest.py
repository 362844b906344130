"""Real SGLang servers on the CPU, and what they are asked for. One server at a time."""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from infra.files.atomic import write_atomically
from infra.files.run_folder import RunFolder
from infra.records.data_path import SamplesRecord, TargetRecord
from models.capture.sglang.engine import SGLangEngine
from models.config.recipe import load_recipe
from models.config.target import TargetConfig
from models.run import PreparedRun
from models.targets.prepare import prepare_target

sys.path.append(str(Path(__file__).parent))  # test modules import fake_engine from this folder

RECIPES = Path(__file__).parents[4] / "recipes"
MakeSGLangRun = Callable[..., PreparedRun]


@pytest.fixture(scope="session")
def qwen3_target(tmp_path_factory: pytest.TempPathFactory, tiny_target: TargetRecord) -> TargetRecord:
    """A small Qwen3 with random weights: norms of queries and keys, tied embeddings."""
    folder = tmp_path_factory.mktemp("qwen3")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=1024, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
                num_key_value_heads=2, head_dim=32, tie_word_embeddings=True, bos_token_id=0, eos_token_id=1,
            )
        )  # fmt: skip
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_target.path).save_pretrained(folder)
    return prepare_target(TargetConfig(name=str(folder), aux_layer_ids=(0, 1, 2)))


@pytest.fixture(scope="module")
def sglang_run(
    tmp_path_factory: pytest.TempPathFactory, tiny_target: TargetRecord, tiny_samples: SamplesRecord
) -> Iterator[MakeSGLangRun]:
    """Makes runs of the tiny recipe whose engine is SGLang: `sglang_run("generator.sglang...=", target=...)`."""
    memory = Path("/dev/shm") / f"tests-of-draftsmith-sglang-{os.getpid()}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTSMITH_SHM", str(memory))

        def make(*overrides: str, target: TargetRecord = tiny_target) -> PreparedRun:
            memory.mkdir(exist_ok=True)
            config = load_recipe(RECIPES / "tiny.yaml", ["generator.engine=sglang", *overrides])
            folder = RunFolder(tmp_path_factory.mktemp("run"))
            write_atomically(folder.config, config)
            write_atomically(folder.target, target)
            write_atomically(folder.samples, tiny_samples)
            return PreparedRun.open(folder.path)

        yield make
    shutil.rmtree(memory, ignore_errors=True)


@pytest.fixture
def engine_of() -> Iterator[Callable[..., SGLangEngine]]:
    """Starts an engine that the test's end stops; `kind` may be a subclass with something wrong about it."""
    started: list[closing[SGLangEngine]] = []

    def start(run: PreparedRun, kind: type[SGLangEngine] = SGLangEngine) -> SGLangEngine:
        engine = kind(run, 0)
        started.append(closing(engine))
        return engine

    yield start
    for one in started:
        one.__exit__()


@pytest.fixture
def assert_no_segments_left() -> Callable[[], None]:
    """Asserts that no shared memory of a dead SGLang server is left since the test began.

    Servers of tests that run at the same time have segments too: they are mapped by a live process, or gone shortly.
    """
    shared_memory = Path("/dev/shm")
    before = set(shared_memory.glob("sglang_*"))

    def check() -> None:
        deadline = time.monotonic() + 120
        while left := set(shared_memory.glob("sglang_*")) - before - mapped_by_anyone(shared_memory):
            assert time.monotonic() < deadline, left
            time.sleep(0.5)

    return check


def mapped_by_anyone(folder: Path) -> set[Path]:
    """Files directly in `folder` that a live process has mapped."""
    mapped: set[Path] = set()
    for process in psutil.process_iter():
        try:
            mapped |= {Path(region.path) for region in process.memory_maps()}
        except (psutil.Error, OSError):
            continue
    return {path for path in mapped if path.parent == folder}
