"""The process that prepares samples: cache by content, and refusals for people."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from infra.files.atomic import write_atomically
from infra.files.run_folder import RunFolder
from infra.records.data_path import SamplesRecord, TargetRecord
from infra.refusal import Refusal
from models import preflight
from models.config.data import DataConfig
from models.config.recipe import RunConfig
from models.data import prepare
from models.data.conversations import Document
from models.data.prepare import REFUSED, histogram, prepare_samples, recipe_data, summary, tokenizer_hash
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
    assert prepare_samples(config(source), tiny_target, add_bos=False) == record
    assert {path: path.stat().st_mtime_ns for path in Path(record.path).iterdir()} == before

    shorter = prepare_samples(config(source, max_tokens=32), tiny_target, add_bos=False)
    source.write_text(source.read_text() + json.dumps({"text": story(31)}) + "\n")
    longer = prepare_samples(config(source), tiny_target, add_bos=False)
    assert len({record.path, shorter.path, longer.path}) == 3
    assert len({record.dataset_hash, shorter.dataset_hash, longer.dataset_hash}) == 3


def test_places_are_those_of_the_source_that_is_given(source: Path, tiny_target: TargetRecord) -> None:
    source.write_text(source.read_text() + "{broken\n")
    first = prepare_samples(config(source), tiny_target, add_bos=False)
    moved = source.rename(source.with_name("renamed.jsonl"))
    second = prepare_samples(config(moved), tiny_target, add_bos=False)
    assert first.dataset_hash == second.dataset_hash
    assert [record.refusals[0].split(": ")[0] for record in (first, second)] == [f"{source}:31", f"{moved}:31"]


@pytest.mark.parametrize("late", [json.dumps({"text": story(31)}) + "\n", '{"text": "half a li'])
def test_a_source_that_changes_while_it_is_read_is_refused(
    source: Path, tiny_target: TargetRecord, cache: Path, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """Samples of the longer file would be kept under the hash of the shorter one."""
    before, read = source.read_text(), prepare.training_documents

    def grows(*given: Any) -> Iterator[Document]:
        source.write_text(before + late)
        yield from read(*given)

    with monkeypatch.context() as patched:
        patched.setattr(prepare, "training_documents", grows)
        with pytest.raises(Refusal, match=r"stories\.jsonl' changed while it was read: copy it, and give the copy"):
            prepare_samples(config(source, max_broken_share=0.0), tiny_target, add_bos=False)
    assert [path for path in (cache / "samples").iterdir() if path.is_dir()] == []
    source.write_text(before)
    assert prepare_samples(config(source, max_broken_share=0.0), tiny_target, add_bos=False).broken == 0


def test_a_refusal_leaves_nothing_in_the_cache(source: Path, tiny_target: TargetRecord, cache: Path) -> None:
    source.write_text(source.read_text() + "{broken\n")
    with pytest.raises(ValueError, match=r"stories\.jsonl:31: not valid JSON"):
        prepare_samples(config(source, max_broken_share=0.0), tiny_target, add_bos=False)
    assert [path for path in (cache / "samples").iterdir() if path.is_dir()] == []


def test_broken_records_are_left_out_and_listed(source: Path, tiny_target: TargetRecord) -> None:
    whole = prepare_samples(config(source), tiny_target, add_bos=False)
    source.write_text(source.read_text() + "{broken\n")
    record = prepare_samples(config(source), tiny_target, add_bos=False)
    assert (record.dataset_hash, record.broken) == (whole.dataset_hash, 1)
    (listed,) = (Path(record.path) / REFUSED).read_text().splitlines()
    assert record.refusals == (listed,)
    assert "stories.jsonl:31: not valid JSON" in listed


def test_the_target_without_a_template_is_named(source: Path, tiny_target: TargetRecord) -> None:
    with pytest.raises(ValueError, match="has no chat template"):
        prepare_samples(config(source, chat_template="tokenizer", overlong="drop"), tiny_target, add_bos=False)


def test_the_main_writes_the_record_or_one_message(
    source: Path, tiny_target: TargetRecord, tiny_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "run")
    write_atomically(folder.config, tiny_config.model_copy(update={"data": config(source)}))
    write_atomically(folder.target, tiny_target)
    command = [sys.executable, "-m", "models.data.prepare", str(folder.path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    record = SamplesRecord.read(folder.samples)
    assert f"{record.train_samples:,} to train on" in ended.stdout
    assert len(ended.stdout.strip().splitlines()) == 1

    # A resumed run: its ledger holds the samples that it began with, and the source may have grown since.
    source.write_text(source.read_text() + json.dumps({"text": story(30)}) + "\n")
    monkeypatch.setattr(sys, "argv", command[2:])
    prepare.main()
    assert SamplesRecord.read(folder.samples) == record

    folder.samples.unlink()
    source.write_text("")
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 2
    assert "is empty" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not folder.samples.exists()


def test_prompts_are_checked_before_they_are_regenerated(
    source: Path, tiny_target: TargetRecord, tiny_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regeneration takes GPUs for hours: what would stop the run afterwards stops it first."""
    folder = RunFolder(tmp_path / "run")
    data = config(source, regeneration={}, chat_template="none", max_broken_share=0.02)
    write_atomically(folder.config, tiny_config.model_copy(update={"data": data}))
    write_atomically(folder.target, tiny_target)
    command = [sys.executable, "-m", "models.preflight", str(folder.path)]
    monkeypatch.setattr(sys, "argv", command[2:])
    preflight.main()
    source.write_text(source.read_text() + "{broken\n")
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 2
    assert "1 of 31 records cannot be used, more than data.max_broken_share=0.02 allows" in ended.stderr
    assert "stories.jsonl:31: not valid JSON" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not folder.samples.exists()


def test_python_docs_are_enough_to_train_on(tiny_config: RunConfig, tiny_target: TargetRecord) -> None:
    everything = prepare_samples(tiny_config.data.model_copy(update={"max_samples": None}), tiny_target, False)
    assert everything.train_samples > 3000
    assert everything.train_tokens > 600_000
    assert everything.longest <= 256
    lengths = SampleSet.open(Path(everything.path), "train").lengths
    assert lengths.float().median() > 128


def test_prompts_of_suites_are_not_trained_on(
    source: Path, tiny_target: TargetRecord, tiny_config: RunConfig, tmp_path: Path
) -> None:
    """Those of `promotion.suites` and of `data.exclude`; other suites are other samples, moved ones are the same."""
    suite, further = tmp_path / "suite.jsonl", tmp_path / "further.txt"
    suite.write_text(json.dumps({"turns": [story(3), "Go on."]}) + "\n")
    further.write_text(story(5))
    promotion = tiny_config.promotion.model_copy(update={"suites": {"own": str(suite)}})
    recipe = tiny_config.model_copy(update={"promotion": promotion, "data": config(source, exclude=(str(further),))})
    data = recipe_data(recipe)
    assert data.exclude == (str(further), str(suite))
    record = prepare_samples(data, tiny_target, add_bos=False)
    assert record.compared_prompts == 3
    assert record.benchmark_prompts >= 2
    tokenizer = AutoTokenizer.from_pretrained(tiny_target.path)
    sides = [SampleSet.open(Path(record.path), split) for split in ("train", "heldout")]
    told = {tokenizer.decode(sample.tokens[1:]).split(":")[0] for side in sides for sample in side}
    assert told
    assert not told & {"story 3", "story 5"}
    assert f"{record.benchmark_prompts} with one of 3 benchmark prompts left out" in summary(record)
    moved = further.rename(tmp_path / "moved.txt")
    again = data.model_copy(update={"exclude": (str(suite), str(moved))})
    assert prepare_samples(again, tiny_target, add_bos=False) == record
    moved.write_text("Something else")
    assert prepare_samples(again, tiny_target, add_bos=False).path != record.path


def test_tokens_may_name_their_tokenizer(tiny_target: TargetRecord, tmp_path: Path) -> None:
    """As `samples.json` names it."""
    path = tmp_path / "tokens.jsonl"
    own = tokenizer_hash(Path(tiny_target.path))

    def write(made_by: str, token: int) -> None:
        rows = [{"input_ids": [number, *range(9), token], "loss_mask": [0, *[1] * 10]} for number in range(12)]
        path.write_text("".join(json.dumps(row | {"tokenizer_hash": made_by}) + "\n" for row in rows))

    write(own, tiny_target.vocab_size - 1)
    record = prepare_samples(config(path), tiny_target, add_bos=False)
    assert record.tokenizer_hash == own
    assert record.supervised_share == pytest.approx(10 / 11)
    write("0" * 64, 1)
    with pytest.raises(ValueError, match="made with the tokenizer 0000000000000000, the target's is"):
        prepare_samples(config(path), tiny_target, add_bos=False)
    write(own, tiny_target.vocab_size)
    with pytest.raises(ValueError, match="another tokenizer made these"):
        prepare_samples(config(path), tiny_target, add_bos=False)


def test_the_record_shows_how_samples_are_spread(source: Path, tiny_target: TargetRecord) -> None:
    record = prepare_samples(config(source), tiny_target, add_bos=False)
    for shown in (record.lengths, record.supervised):
        assert shown is not None
        assert sum(shown.counts) == record.train_samples
    assert record.turns is None
    assert record.thinking == 0
    assert len(record.source_hash) == 64


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(st.integers(0, 200_000), min_size=1, max_size=80))
def test_histograms(values: list[int]) -> None:
    found = histogram(np.array(values, dtype=np.int64))
    assert 1 <= len(found.counts) <= 24
    assert str(found.width).rstrip("0") in {"1", "2", "5"}
    edges = [found.first + found.width * place for place in range(len(found.counts))]
    assert list(found.counts) == [sum(edge <= value < edge + found.width for value in values) for edge in edges]
    assert found.counts[0] > 0 < found.counts[-1]
