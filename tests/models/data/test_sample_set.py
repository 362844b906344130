"""What was written is what is read, and a changed file is not read."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infra.records.data_path import SamplesRecord
from models.data.encoded import EncodedSample
from models.data.sample_set import SampleSet, read_manifest, write_sample_set
from models.data.samples import Splits

RECORD = SamplesRecord(
    path="",
    dataset_hash="d",
    template_hash="none",
    train_samples=2,
    heldout_samples=1,
    train_tokens=5,
    longest=3,
    supervised_share=0.5,
    dropped=0,
    truncated=0,
    unusable=0,
)


def encoded(tokens: list[int], mask: list[bool]) -> EncodedSample:
    return EncodedSample(np.array(tokens, dtype=np.int32), np.array(mask), "document")


SAMPLES = st.lists(
    st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans()), min_size=1, max_size=12), min_size=1, max_size=8
).map(lambda rows: [encoded([token for token, _ in row], [flag for _, flag in row]) for row in rows])


@given(train=SAMPLES, heldout=SAMPLES)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, train, heldout) -> None:
    folder = tmp_path_factory.mktemp("set")
    write_sample_set(folder, Splits(train, heldout), RECORD)
    for split, written in (("train", train), ("heldout", heldout)):
        read = SampleSet.open(folder, split)
        assert len(read) == len(written)
        assert read.lengths.tolist() == [len(one.tokens) for one in written]
        for index, one in enumerate(written):
            assert read[index].tokens.dtype == torch.int64
            assert read[index].loss_mask.dtype == torch.bool
            assert read[index].tokens.tolist() == one.tokens.tolist()
            assert read[index].loss_mask.tolist() == one.loss_mask.tolist()
            assert read[index].id == one.id


def written(folder: Path) -> Path:
    train = [encoded([1, 2], [True, True]), encoded([3, 4, 5], [False, True, True])]
    folder.mkdir(exist_ok=True)
    write_sample_set(folder, Splits(train, [encoded([6], [True])]), RECORD)
    return folder


def test_iteration_ends(tmp_path: Path) -> None:
    assert [sample.tokens.tolist() for sample in SampleSet.open(written(tmp_path), "train")] == [[1, 2], [3, 4, 5]]


def test_the_manifest_names_where_the_folder_lies_now(tmp_path: Path) -> None:
    moved = written(tmp_path / "before").rename(tmp_path / "after")
    assert read_manifest(moved).samples == RECORD.model_copy(update={"path": str(moved)})


def test_changed_and_missing_files_are_refused(tmp_path: Path) -> None:
    written(tmp_path)
    path = tmp_path / "train.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="missing or was changed"):
        SampleSet.open(tmp_path, "train")
    assert len(SampleSet.open(tmp_path, "heldout")) == 1
    path.unlink()
    with pytest.raises(ValueError, match="missing or was changed"):
        SampleSet.open(tmp_path, "train")
    with pytest.raises(ValueError, match="not a sample set"):
        SampleSet.open(tmp_path / "elsewhere", "train")
