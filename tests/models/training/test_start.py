"""A warm start: training begins where a registered version ended, and refuses what is of another kind."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from continued import fine_tuned
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from infra.files.atomic import write_atomically
from infra.files.run_folder import RunFolder
from infra.records.data_path import TargetRecord
from infra.records.drafts import StartRecord
from models.checkpoint import VOCABULARY
from models.config.recipe import load_recipe
from models.drafts.registry import build_draft
from models.drafts.vocabulary import DraftVocabulary
from models.export.description import start_of
from models.export.served_target import read_served_target
from models.export.sglang import write_export
from models.preflight import check_settings
from models.run import PreparedRun, RunWithTarget
from models.targets.weights import read_target_head
from models.training.start import load_start

VOCABULARY_SIZE = "draft.vocab_size=512"
WARM = (VOCABULARY_SIZE, "data.max_samples=60", "training.max_steps=2", "training.log_steps=1")


TINY = Path(__file__).parents[3] / "recipes" / "tiny.yaml"


def random_target(folder: Path, **sizes: int) -> Path:
    shape = {"vocab_size": 600, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 3}
    model = LlamaForCausalLM(LlamaConfig(**(shape | {"num_attention_heads": 2} | sizes)))
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture
def continued(tmp_path: Path) -> Callable[[Path], RunWithTarget]:
    """Runs whose training starts from the export of a random draft for another target, `base`."""
    base = random_target(tmp_path / "base")
    config = load_recipe(TINY, [VOCABULARY_SIZE, f"training.start_from={tmp_path}/champion"])
    head, vocabulary = read_target_head(base, torch.float32), DraftVocabulary(torch.arange(512), 600)
    draft = build_draft(config.draft, head.embedding, vocabulary, config.target.aux_layer_ids)
    made_for = {"target": "base", "target_revision": "1" * 40, "run": "tiny-1"}
    write_export(draft, tmp_path / "champion", made_for, read_served_target(base))

    def run(target: Path) -> RunWithTarget:
        folder = RunFolder(tmp_path / f"run-{target.name}")
        shutil.copytree(tmp_path / "champion", folder.start)
        sizes = {"hidden_size": 32, "num_layers": 3, "vocab_size": 600, "model_type": "llama", "licence": "x"}
        return RunWithTarget(
            folder, config, TargetRecord(name=target.name, path=str(target), revision="2" * 40, **sizes)
        )

    return run


def test_a_fine_tuned_target_continues_from_the_draft_of_its_base(continued, tmp_path, capsys):
    run = continued(random_target(tmp_path / "tuned"))
    check_settings(run)
    assert "trained for base 111111111111, and continues for tuned 222222222222" in capsys.readouterr().out
    stored = load_file(tmp_path / "champion" / "model.safetensors")
    assert torch.equal(load_start(run).state_dict()["fc.weight"], stored["fc.weight"].float())
    expected = StartRecord(draft="champion", run="tiny-1", target="base", target_revision="1" * 40)
    assert start_of(run) == expected


def test_a_default_and_the_same_size_in_numbers_are_one_shape(tmp_path):
    """Published drafts of all tokens are read with `vocab_size: null`."""
    target = random_target(tmp_path / "target")
    head = read_target_head(target, torch.float32)
    published = load_recipe(TINY, ["draft.vocab_size=null"])
    vocabulary = DraftVocabulary(torch.arange(600), 600)
    draft = build_draft(published.draft, head.embedding, vocabulary, published.target.aux_layer_ids)
    folder = RunFolder(tmp_path / "run")
    write_export(draft, folder.start, {}, read_served_target(target))
    config = load_recipe(TINY, ["draft.vocab_size=600", "draft.hidden_size=32", "training.start_from=1"])
    sizes = {"hidden_size": 32, "num_layers": 3, "vocab_size": 600, "model_type": "llama", "licence": "x"}
    record = TargetRecord(name="t", path=str(target), revision="2" * 40, **sizes)
    assert load_start(RunWithTarget(folder, config, record)).config == config.draft
    config = load_recipe(TINY, ["draft.vocab_size=599", "training.start_from=1"])
    with pytest.raises(ValueError, match=r"draft\.vocab_size is 600, the recipe's 599"):
        load_start(RunWithTarget(folder, config, record))


@pytest.mark.parametrize("size", ["vocab_size", "hidden_size"])
def test_a_target_of_other_shapes_does_not_continue(size, continued, tmp_path):
    run = continued(random_target(tmp_path / "other", **{size: 616}))
    with pytest.raises(ValueError, match=r"training\.start_from=.*champion does not fit other: .* Leave"):
        load_start(run)


def first_step(folder: RunFolder) -> dict[str, float]:
    return json.loads(folder.metrics.read_text().splitlines()[0])


@pytest.fixture
def exported(make_run, run_to_the_end, start) -> RunFolder:
    """A short training, exported: the version that others start from."""
    folder = make_run("champion", VOCABULARY_SIZE, "data.max_samples=160", "training.max_steps=60")
    run_to_the_end(folder)
    output, _ = start("models.export.sglang", folder).communicate(timeout=400)
    assert folder.export.is_dir(), output
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_warm_start_goes_on_where_the_version_ended(exported: RunFolder, make_run, run_to_the_end):
    """On the same samples: a better first step than a new draft's, with the version's vocabulary, not the samples'."""
    cold, warm = make_run("cold", *WARM), make_run("warm", *WARM, "training.start_from=1")
    shutil.copytree(exported.export, warm.start)
    for folder in (cold, warm):
        run_to_the_end(folder)
    assert first_step(warm)["loss"] < 0.85 * first_step(cold)["loss"]
    assert first_step(warm)["acceptance_by_position"][0] > first_step(cold)["acceptance_by_position"][0] + 0.1
    vocabularies = [
        load_file(folder.checkpoint(step, 1) / "draft.safetensors")[VOCABULARY]
        for folder, step in ((exported, 60), (warm, 2), (cold, 2))
    ]
    assert torch.equal(vocabularies[0], vocabularies[1])
    assert not torch.equal(vocabularies[0], vocabularies[2])
    refuses_other_kinds(exported, make_run)
    continues_for_a_fine_tuned_target(exported, make_run, run_to_the_end, first_step(cold)["loss"])


def continues_for_a_fine_tuned_target(exported: RunFolder, make_run, run_to_the_end, new_loss: float) -> None:
    """Its first step is better than a new draft's, too."""
    folder = make_run("tuned", *WARM, "training.start_from=1")
    target = PreparedRun.open(exported.path).target
    tuned = fine_tuned(Path(target.path), folder.path / "target", steps=30)
    write_atomically(folder.target, target.model_copy(update={"path": str(tuned), "revision": "tuned"}))
    shutil.copytree(exported.export, folder.start)
    run_to_the_end(folder)
    assert first_step(folder)["loss"] < 0.9 * new_loss
    start = start_of(PreparedRun.open(folder.path))
    assert start is not None
    assert start.target_revision == target.revision != "tuned"


def refuses_other_kinds(exported: RunFolder, make_run) -> None:
    """Another target, another shape, other layers: each is named before anything is trained."""

    def refused(name: str, *overrides: str) -> str:
        folder = make_run(name, *WARM, *overrides)
        shutil.copytree(exported.export, folder.start)
        with pytest.raises(ValueError, match=r"training\.start_from") as error:
            check_settings(PreparedRun.open(folder.path))
        return str(error.value)

    assert "draft.intermediate_size is 512, the recipe's 256" in refused("narrow", "draft.intermediate_size=256")
    assert "aux_layer_ids are [0, 1, 2], the recipe's [0, 1]" in refused("layers", "target.aux_layer_ids=[0, 1]")
    folder = make_run("steps", *WARM, "draft.ttt_steps=2")
    shutil.copytree(exported.export, folder.start)
    assert load_start(PreparedRun.open(folder.path)).positions == 2, "how it is trained may change"
    assert Path(exported.export).is_dir()
