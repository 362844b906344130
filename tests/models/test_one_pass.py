"""data.regeneration.capture: the target answers while it is captured, each prompt once, whatever dies in between."""

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.files.atomic import sha256_file, write_atomically
from infra.files.run_folder import RunFolder
from infra.ledger.ledger import Ledger
from infra.ledger.schema import samples
from infra.records.data_path import RegeneratedRecord, TargetRecord
from infra.refusal import Refusal
from models.checkpoint import WEIGHTS
from models.config.recipe import load_recipe
from models.data import prepare, python_docs
from models.regeneration import regenerate
from models.run import PreparedRun

TINY = Path(__file__).parents[2] / "recipes" / "tiny.yaml"
PROMPT, ANSWER = 13, 16
SETTINGS = (
    f"data.regeneration={{temperature: 1.0, max_new_tokens: {ANSWER}, prompt_tokens: {PROMPT - 1}, capture: true}}",
    "data.overlong=truncate",
    "data.heldout_share=0.1",
    "training.checkpoint_steps=4",
    "training.log_steps=1",
    "training.warmup_steps=4",
)
DOCUMENTS = 64


@pytest.fixture
def make_answered_run(
    make_run: Callable[..., RunFolder], tiny_target: TargetRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., RunFolder]:
    """A run of the tiny recipe whose prompts are answered as the recipe says, ready for generators and trainer."""

    def make(name: str, *overrides: str) -> RunFolder:
        monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
        source = tmp_path / "prompts.jsonl"
        texts = [text for _, text in islice(python_docs.documents(), DOCUMENTS)]
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        folder = RunFolder(tmp_path / name)
        config = load_recipe(TINY, [f"data.source={source}", *SETTINGS, *overrides])
        write_atomically(folder.config, config)
        write_atomically(folder.target, tiny_target)
        monkeypatch.setattr("sys.argv", ["", str(folder.path)])
        regenerate.main()
        prepare.main()
        return folder

    return make


def rows_of(ledger: Ledger) -> list[Any]:
    with ledger.read() as rows:
        return rows.all(rows.select(samples).order_by(samples.c.epoch, samples.c.ordinal))


def weights(folder: RunFolder) -> str:
    return sha256_file(folder.checkpoint_folders()[-1] / WEIGHTS)


def test_every_prompt_is_answered_once(
    make_answered_run: Callable[..., RunFolder], run_to_the_end: Callable[[RunFolder], None]
) -> None:
    folder = make_answered_run("run", "training.epochs=2")
    record: RegeneratedRecord = RegeneratedRecord.read(folder.regenerated)
    assert record.documents == 32
    assert record.unanswered == DOCUMENTS - record.duplicates - 32
    run_to_the_end(folder)
    run = PreparedRun.open(folder.path)
    found, known = rows_of(run.open_ledger()), run.open_samples()
    assert len(found) == 2 * len(known)
    answers: dict[int, str] = {}
    for row in found:
        assert row.state == "consumed"
        prompt = known.prompt(row.sample)
        assert (row.answer is None) == (prompt is None)
        if prompt is not None:
            assert len(prompt) <= PROMPT
            assert answers.setdefault(row.sample, row.answer) == row.answer
            sample = known.answered(row.sample, json.loads(row.answer))
            assert len(sample.tokens) == row.tokens < known.lengths[row.sample]
            assert sample.loss_mask.tolist() == [False] * len(prompt) + [True] * (row.tokens - len(prompt))
    assert len(answers) == run.samples.unanswered
    assert len(set(answers.values())) > 1
    assert not list(run.open_transport().keys())


@pytest.mark.slow
def test_a_killed_trainer_goes_on_with_the_same_answers(
    make_answered_run: Callable[..., RunFolder],
    run_to_the_end: Callable[[RunFolder], None],
    kill_at_checkpoint: Callable[..., None],
) -> None:
    whole, killed = make_answered_run("whole-run"), make_answered_run("killed-run")
    run_to_the_end(whole)
    kill_at_checkpoint(killed, 8)
    before = {row.sample: row.answer for row in rows_of(PreparedRun.open(killed.path).open_ledger()) if row.answer}
    run_to_the_end(killed)
    after = {row.sample: row.answer for row in rows_of(PreparedRun.open(killed.path).open_ledger())}
    assert before
    assert before.items() <= after.items()
    assert weights(killed) == weights(whole)


def test_the_draft_vocabulary_is_of_what_was_answered_before(make_answered_run: Callable[..., RunFolder]) -> None:
    """Places for answers hold no tokens."""
    known = PreparedRun.open(make_answered_run("run").path).open_samples()
    closed = [known[index] for index in range(len(known)) if known.prompt(index) is None]
    expected = torch.cat([sample.tokens[sample.loss_mask] for sample in closed])
    assert torch.equal(known.supervised.sort().values, expected.sort().values)
    assert len(closed) < len(known)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("transport={kind: stored, folder: objects}", "leave one of them out"),
        ("data.thinking=mask", "set it to keep, or leave capture out"),
    ],
)
def test_what_cannot_be_captured_on_the_way_is_refused(override: str, message: str) -> None:
    with pytest.raises(Refusal, match=message):
        load_recipe(TINY, [*SETTINGS, override])
