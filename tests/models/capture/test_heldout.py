"""The file of the held-out texts: read back as written, and not read at all when it is damaged."""

import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from infra.files.locks import hold
from infra.files.run_folder import RunFolder
from models.capture.engine import Continued
from models.capture.heldout import make_heldout, read_heldout, write_heldout
from models.capture.plain_engine import PlainEngine
from models.data.media import Prompt
from models.run import PreparedRun

TEXTS = [Continued((1, 2), (3,), torch.arange(12.0).reshape(3, 4)), Continued((5,), (6, 7), torch.ones(3, 4))]


def test_texts_are_read_back(tmp_path: Path) -> None:
    file = tmp_path / "heldout.safetensors"
    assert read_heldout(file) is None
    write_heldout(file, TEXTS)
    texts = read_heldout(file)
    assert texts is not None
    for text, expected in zip(texts, TEXTS, strict=True):
        assert (text.prompt, text.continuation) == (expected.prompt, expected.continuation)
        assert torch.equal(text.aux, expected.aux)


def test_writing_needs_no_second_copy_of_the_file(tmp_path: Path) -> None:
    texts = [Continued((1,), (2,), torch.ones(2, 2**20)) for _ in range(4)]
    tracemalloc.start()
    try:
        write_heldout(tmp_path / "heldout.safetensors", texts)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 0.5 * sum(text.aux.nbytes for text in texts)
    assert [file.name for file in tmp_path.iterdir()] == ["heldout.safetensors"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-10],
        lambda data: bytes(len(data)),
        lambda data: data[:-40] + bytes(40),
    ],
    ids=["empty", "torn", "zeroed", "last tensor zeroed"],
)
def test_a_damaged_file_is_removed(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    file = tmp_path / "heldout.safetensors"
    write_heldout(file, TEXTS)
    file.write_bytes(damage(file.read_bytes()))
    assert read_heldout(file) is None
    assert not file.exists()


class CountedEngine(PlainEngine):
    """Counts how often it continued the held-out prompts."""

    continued = 0

    def continue_greedily(self, prompts: Sequence[Prompt], max_new_tokens: int) -> list[Continued]:
        self.continued += 1
        return super().continue_greedily(prompts, max_new_tokens)


def test_one_of_several_generators_makes_the_texts_and_the_others_do_not_wait(
    make_run: Callable[..., RunFolder],
) -> None:
    settings = ("data.max_samples=12", "data.max_tokens=64", "training.samples_per_step=4", "training.heldout_steps=1")
    run = PreparedRun.open(make_run("run", *settings, "training.heldout_prompts=2").path)
    engine, path = CountedEngine(run), run.folder.heldout
    with hold(path.with_name(f".{path.name}.lock")):  # another one makes them now
        make_heldout(run, engine)
    assert (engine.continued, path.exists()) == (0, False)
    make_heldout(run, engine)
    make_heldout(run, engine)
    assert engine.continued == 1
    assert read_heldout(path)
    path.write_bytes(b"")  # damaged, which the trainer notices, and not each generator that starts
    make_heldout(run, engine)
    assert engine.continued == 1
    assert read_heldout(path) is None
    make_heldout(run, engine)
    assert engine.continued == 2
    assert read_heldout(path)
