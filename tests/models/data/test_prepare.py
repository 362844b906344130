"""The process that prepares samples: cache by content, and refusals for people."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from infra.files import write_atomically
from infra.records import SamplesRecord, TargetRecord
from infra.run_folder import RunFolder
from models.config import RunConfig
from models.data.config import DataConfig
from models.data.prepare import prepare_samples
from models.data.sample_set import SampleSet


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_target: TargetRecord) -> Path:
    """A cache of this test's own; the tiny target was taken from the common one before."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def story(number: int) -> str:
    return f"story {number}: " + "once upon a time there was a module " * (number % 7 + 1)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "stories.jsonl"
    path.write_text("".join(json.dumps({"text": story(number)}) + "\n" for number in range(30)))
    return path


def config(source: Path, **changes) -> DataConfig:
    return DataConfig(
        **{"source": str(source), "chat_template": "none", "max_tokens": 64, "overlong": "split", **changes}
    )


def test_samples_and_their_record_agree(source: Path, tiny_target: TargetRecord) -> None:
    record = prepare_samples(config(source), tiny_target, add_bos=False)
    train, heldout = (SampleSet.open(Path(record.path), split) for split in ("train", "heldout"))
    assert (len(train), len(heldout)) == (record.train_samples, record.heldout_samples)
    assert int(train.lengths.sum()) == record.train_tokens
    assert int(train.lengths.max()) == record.longest <= 64
    masks = [sample.loss_mask for sample in train]
    assert record.supervised_share == pytest.approx(sum(int(mask.sum()) for mask in masks) / record.train_tokens)
    # The tiny target's tokenizer begins every text itself, and nobody generates that token.
    tokenizer = AutoTokenizer.from_pretrained(tiny_target.path)
    assert all(sample.tokens[0] == tokenizer.bos_token_id and not sample.loss_mask[0] for sample in train)
    told = {tokenizer.decode(sample.tokens[1:]).split(":")[0] for side in (train, heldout) for sample in side}
    assert {f"story {number}" for number in range(30)} <= told
    assert record.split > 0


def test_the_same_content_comes_from_the_cache(source: Path, tiny_target: TargetRecord, cache: Path) -> None:
    record = prepare_samples(config(source), tiny_target, add_bos=False)
    before = {path: path.stat().st_mtime_ns for path in Path(record.path).iterdir()}
    moved = source.rename(source.with_name("renamed.jsonl"))
    assert prepare_samples(config(moved), tiny_target, add_bos=False) == record
    assert {path: path.stat().st_mtime_ns for path in Path(record.path).iterdir()} == before

    shorter = prepare_samples(config(moved, max_tokens=32), tiny_target, add_bos=False)
    moved.write_text(moved.read_text() + json.dumps({"text": story(31)}) + "\n")
    longer = prepare_samples(config(moved), tiny_target, add_bos=False)
    assert len({record.path, shorter.path, longer.path}) == 3
    assert len({record.dataset_hash, shorter.dataset_hash, longer.dataset_hash}) == 3


def test_a_refusal_leaves_nothing_in_the_cache(source: Path, tiny_target: TargetRecord, cache: Path) -> None:
    source.write_text(source.read_text() + "{broken\n")
    with pytest.raises(ValueError, match=r"stories\.jsonl:31: not valid JSON"):
        prepare_samples(config(source), tiny_target, add_bos=False)
    assert [path for path in (cache / "samples").iterdir() if path.is_dir()] == []


def test_the_target_without_a_template_is_named(source: Path, tiny_target: TargetRecord) -> None:
    with pytest.raises(ValueError, match="has no chat template"):
        prepare_samples(config(source, chat_template="tokenizer", overlong="drop"), tiny_target, add_bos=False)


def test_the_main_writes_the_record_or_one_message(
    source: Path, tiny_target: TargetRecord, tiny_config: RunConfig, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    write_atomically(folder.config, tiny_config.model_copy(update={"data": config(source)}))
    write_atomically(folder.target, tiny_target)
    command = [sys.executable, "-m", "models.data.prepare", str(folder.path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    record = SamplesRecord.read(folder.samples)
    assert f"{record.train_samples} to train on" in ended.stdout
    assert len(ended.stdout.strip().splitlines()) == 1

    folder.samples.unlink()
    source.write_text("")
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 2
    assert "is empty" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not folder.samples.exists()


def test_python_docs_are_enough_to_train_on(tiny_config: RunConfig, tiny_target: TargetRecord) -> None:
    everything = prepare_samples(tiny_config.data.model_copy(update={"max_samples": None}), tiny_target, False)
    assert everything.train_samples > 3000
    assert everything.train_tokens > 600_000
    assert everything.longest <= 256
    lengths = SampleSet.open(Path(everything.path), "train").lengths
    assert lengths.float().median() > 128
