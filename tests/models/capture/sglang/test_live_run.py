"""A whole training from users' requests: exactly once whatever dies, and without what users keep to themselves."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from infra.files.atomic import write_atomically
from infra.files.run_folder import RunFolder
from infra.ledger.schema import samples
from infra.records.data_path import TargetRecord
from infra.sglang.config import SGLangConfig
from models.capture import collect
from models.capture.heldout import read_heldout
from models.config.recipe import load_recipe
from models.data import prepare, python_docs
from models.data.tokenizer import read_tokenizer
from models.run import PreparedRun
from tests.models.capture.sglang.operated import Operated, operated_server

RECIPE = Path(__file__).parents[4] / "recipes" / "tiny.yaml"
SAMPLES = 96
SECRETS = ("jane.doe@example.com", "sk-abcdefghijklmnopqrstuv0123", "4111 1111 1111 1111", "password=hunter2hunter2")
"""In every third request."""


@pytest.fixture
def operated(
    sglang_run: Callable[..., PreparedRun], path_in_memory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Operated]:
    settings = SGLangConfig(arguments=("--sleep-on-idle",))
    with operated_server(sglang_run(), tmp_path_factory.mktemp("operated"), True, settings) as operated:
        yield operated


@contextmanager
def users(operated: Operated, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    """Two users who ask as long as this lasts; yields how many requests the server has answered, and how many not."""
    counts, stop = [0, 0], threading.Event()
    texts = [text[:90] for _, text in python_docs.documents()]

    def use(first: int) -> None:
        for index in range(first, 10**6, 2):
            if stop.is_set():
                return
            text = texts[index % len(texts)]
            if index % 3 == 0:
                text += f" {SECRETS[index // 3 % len(SECRETS)]} "
            tokens: Any = tokenizer(text, add_special_tokens=False)["input_ids"]
            try:
                operated.ask(tokens)
                counts[0] += 1
                stop.wait(0.1)
            except httpx.HTTPError:
                counts[1] += 1
                stop.wait(0.2)

    threads = [threading.Thread(target=use, args=(first,)) for first in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield counts
    finally:
        stop.set()
        for thread in threads:
            thread.join(90)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_draft_learns_from_users(
    operated: Operated,
    tiny_target: TargetRecord,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    start: Callable[..., Any],
    kill_tree: Callable[[int], None],
) -> None:
    """The generator is killed once, by SIGKILL, and the trainer once."""
    folder, tokenizer = RunFolder(tmp_path / "live-run"), read_tokenizer(tiny_target.path)
    steps = (
        "training.checkpoint_steps=2",
        "training.log_steps=1",
        "training.heldout_steps=4",
        "training.warmup_steps=2",
    )
    write_atomically(folder.config, load_recipe(RECIPE, [*operated.overrides(SAMPLES), *steps]))
    write_atomically(folder.target, tiny_target)
    monkeypatch.setattr("sys.argv", ["", str(folder.path)])
    with users(operated, tokenizer) as counts:
        collect.main()
        prepare.main()
        run = PreparedRun.open(folder.path)
        generator, trainer = start("models.capture.generator", folder), start("models.training.launch", folder, ranks=1)
        wait_for_checkpoint(folder)
        kill_tree(generator.pid)
        generator = start("models.capture.generator", folder)
        kill_tree(trainer.pid)
        trainer = start("models.training.launch", folder, ranks=1)
        for process in (trainer, generator):
            output, _ = process.communicate(timeout=900)
            assert process.returncode == 0, output
        assert counts[0] > SAMPLES
        assert counts[1] == 0
    known, ledger = run.open_samples(), run.open_ledger()
    with ledger.read() as rows:
        found = rows.all(rows.select(samples).order_by(samples.c.ordinal))
    assert [row.state for row in found] == ["consumed"] * SAMPLES
    assert sorted(row.sample for row in found) == list(range(SAMPLES))
    texts = [known.answered(row.sample, row.answer and json.loads(row.answer)) for row in found]
    assert len({tuple(text.tokens.tolist()) for text in texts}) == SAMPLES
    assert all(text.loss_mask.any() and not text.loss_mask[0] for text in texts)
    assert not list(run.open_transport().keys())
    assert_private(folder, run, tokenizer, [text.tokens for text in texts])


def wait_for_checkpoint(folder: RunFolder) -> None:
    deadline = time.monotonic() + 600
    while not folder.checkpoint_folders():
        assert time.monotonic() < deadline, "no checkpoint came"
        time.sleep(0.05)


def assert_private(
    folder: RunFolder, run: PreparedRun, tokenizer: PreTrainedTokenizerBase, texts: list[torch.Tensor]
) -> None:
    """No secret stands anywhere in the run's folder: not as text, nor in the text that stored token ids stand for."""
    heldout = run.open_samples("heldout")
    texts += [heldout[index].tokens for index in range(len(heldout))]
    texts += [torch.tensor([*one.prompt, *one.continuation]) for one in read_heldout(folder.heldout) or ()]
    stored = [str(tokenizer.decode(text.tolist())) for text in texts]
    assert sum("the" in text for text in stored) > len(stored) / 4, "nothing to search"
    files = {file: file.read_bytes() for file in folder.path.rglob("*") if file.is_file()}
    assert folder.heldout in files
    for secret in SECRETS:
        assert not [text for text in stored if secret in text]
        assert not [file for file, content in files.items() if secret.encode() in content]
        ids: Any = tokenizer(f" {secret} ", add_special_tokens=False)["input_ids"]
        # Without what an edge may be merged with.
        binary = torch.tensor(ids[2:-2], dtype=torch.int32).numpy().tobytes()
        assert not [file for file, content in files.items() if binary in content]
