"""Tokenized in processes of their own, and after a kill, documents become the samples of one process."""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from infra.files.private import MARK
from models.config.data import DataConfig
from models.data.conversations import Document, Message
from models.data.outcomes import Outcome, PreparationCounts, read_outcomes, write_outcomes
from models.data.parts import MakeEncoder, make_encoder, outcomes_in_parts
from tests.models.chat_templates import CHATML


def conversation(number: int) -> Document:
    turns = (Message("user", f"{number}?"), Message("assistant", f"{number * 7}!" * (1 + number % 5)))
    return Document(f"a.jsonl:{number}", turns, plain=False)


ROOT = Path(__file__).parents[3]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}
DOCUMENTS = [conversation(number) for number in (*range(50), 3, 4, *range(50, 90))]


@pytest.fixture
def make(make_tokenizer: Any, tmp_path: Path) -> MakeEncoder:
    target = tmp_path / "target"
    make_tokenizer(CHATML).save_pretrained(target)
    config = DataConfig(min_tokens=2, max_tokens=30, overlong="drop")
    return partial(make_encoder, str(target), ("12?",), config=config, add_bos=False, vocabulary=1000)


def same(found: list[Outcome], expected: list[Outcome]) -> bool:
    def plain(one: Outcome) -> tuple[Any, ...]:
        samples = [(each.id, each.document, each.turns, each.thinking, each.prompt) for each in one.samples]
        return one.place, one.wording, one.counts, one.error, samples

    return list(map(plain, found)) == list(map(plain, expected))


def test_processes_make_what_one_makes_and_finished_parts_are_kept(
    make: MakeEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = list(make().outcomes(DOCUMENTS))
    assert any(one.samples for one in expected)
    assert any(one.counts.dropped for one in expected)
    parts = tmp_path / ".set.parts"
    assert same(list(outcomes_in_parts(DOCUMENTS, make, parts)), expected), "few documents"
    assert not parts.exists()
    monkeypatch.setattr("models.data.parts.FEW", 10)
    monkeypatch.setattr("models.data.parts.PART", 16)
    assert same(list(outcomes_in_parts(DOCUMENTS, make, parts)), expected)
    files = sorted(parts.iterdir())
    assert len(files) == -(-len(DOCUMENTS) // 16)
    kept = {file: file.stat().st_mtime_ns for file in files}
    files[2].unlink()
    assert same(list(outcomes_in_parts(DOCUMENTS, make, parts, private_since=1e6)), expected)
    assert parts.stat().st_mode & 0o077 == 0
    assert (parts / MARK).stat().st_mtime == 1e6
    assert [file for file in kept if file.stat().st_mtime_ns != kept[file]] == [files[2]]


KILLED = """
import os, signal
from models.data import parts

if __name__ == "__main__":
    with parts.worker_pool(1, None) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_preparation_leaves_no_process(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    with subprocess.Popen([sys.executable, str(script)], cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        worker = int(process.stdout.readline().split()[-1])
    assert process.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 60
    while psutil.pid_exists(worker) and psutil.Process(worker).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "it goes on without anybody who reads what it writes"
        time.sleep(0.1)


def test_a_part_is_read_as_it_was_written(tmp_path: Path) -> None:
    nothing = Outcome("b.txt:1", "", PreparationCounts(refusals=["b.txt:1: an image"]))
    wrong = Outcome("b.txt:2", "ab" * 32, PreparationCounts(), error="b.txt:2: another tokenizer")
    write_outcomes(tmp_path / "part.npz", [nothing, wrong])
    assert list(read_outcomes(tmp_path / "part.npz")) == [nothing, wrong]
    assert np.load(tmp_path / "part.npz")["tokens"].dtype == np.int32
