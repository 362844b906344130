"""A warm start: training begins where a registered version ended, and refuses what is of another kind."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from infra.files.run_folder import RunFolder
from models.checkpoint import VOCABULARY
from models.preflight import check_settings
from models.run import PreparedRun
from models.training.start import load_start

VOCABULARY_SIZE = "draft.vocab_size=512"
WARM = (VOCABULARY_SIZE, "data.max_samples=60", "training.max_steps=2", "training.log_steps=1")


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
    settings = json.loads((folder.start / "config.json").read_text())
    settings["draftsmith"]["target_revision"] = "another"
    (folder.start / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match="trained for revision another of its target"):
        load_start(PreparedRun.open(folder.path))
    assert Path(exported.export).is_dir()
