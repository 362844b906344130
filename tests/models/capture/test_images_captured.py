"""Samples with images: captured as the target sees them, and trained on by drafts that read hidden states alone."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.files.run_folder import RunFolder
from infra.records.data_path import HELDOUT_LENGTH, HELDOUT_SEEN
from infra.refusal import Refusal
from models.capture.heldout import read_heldout
from models.capture.plain_engine import PlainEngine
from models.data.images import ImageProcessor
from models.data.media import Prompt
from models.data.prompts import seen_prompts
from models.run import PreparedRun
from models.targets.hidden_states import HiddenStates
from models.targets.model import TargetModel
from tests.models.seeing_targets import EAGLE3, MEDUSA, MTP, SEEING


@pytest.mark.parametrize("family", SEEING)
def test_captured_states_are_the_targets_own(family: str, seeing_run: Callable[..., RunFolder]) -> None:
    run = PreparedRun.open(seeing_run(family).path)
    engine, samples = PlainEngine(run), run.open_samples()
    canaries = samples.canaries(32)
    assert [bool(one.images) for one in canaries] in ([True], [False, True])
    for one in (*canaries, *canaries[::-1]):
        engine.check_canary(one.tokens, one.images)
    target = TargetModel.load(Path(run.target.path), (0, 1, 2), torch.float32, sees=True)
    processor = ImageProcessor(Path(run.target.path))
    for index in range(len(samples)):
        one = samples[index]
        record = engine.capture(f"run/0/{index}/1", one.tokens, one.images).record
        back = run.layout.empty(len(one.tokens))
        engine.transport.get(record, run.layout.views(back))
        reference = target.model(
            one.tokens[None], output_hidden_states=True, **processor.inputs(one.tokens, one.images)
        )
        assert (back.last - reference.hidden_states[-1][0]).abs().max() <= 1e-5
        assert (run.layout.by_layer(back.aux)[1] - reference.hidden_states[2][0]).abs().max() <= 1e-5
        if one.images:
            blind = target.forward(one.tokens[None])
            assert (back.last - blind.last[0]).abs().max() > 1e-2


@pytest.mark.parametrize("family", SEEING)
def test_answers_about_an_image_are_the_targets_own(family: str, seeing_run: Callable[..., RunFolder]) -> None:
    run = PreparedRun.open(seeing_run(family).path)
    engine, heldout = PlainEngine(run), run.open_samples("heldout")
    shown = seen_prompts(heldout, 2, run.samples.longest)
    assert shown
    plain = Prompt((0, 5, 9, 20))
    found = engine.continue_greedily([*shown, plain], 6)
    assert [one.shown for one in found] == [True] * len(shown) + [False]
    for prompt, one in zip([*shown, plain], found, strict=True):
        whole = torch.tensor([*one.prompt, *one.continuation])
        hidden = engine.prefill(whole[:-1], prompt.images)
        said = engine.target.logits(hidden.last).argmax(-1)[len(one.prompt) - 1 :]
        assert said.tolist() == list(one.continuation)
        assert torch.equal(one.aux, hidden.aux)


@pytest.mark.parametrize("family", SEEING)
def test_embeddings_of_images_are_captured_for_drafts_that_read_them(
    family: str, seeing_run: Callable[..., RunFolder]
) -> None:
    run = PreparedRun.open(seeing_run(family, draft=EAGLE3).path)
    engine, samples = PlainEngine(run), run.open_samples()
    for one in samples.canaries(32):
        engine.check_canary(one.tokens, one.images)
    target = TargetModel.load(Path(run.target.path), (0, 1, 2), torch.float32, sees=True)
    processor, media = ImageProcessor(Path(run.target.path)), torch.tensor(run.target.media_ids)
    seen = moved = 0
    for index in range(len(samples)):
        one = samples[index]
        record = engine.capture(f"run/0/{index}/1", one.tokens, one.images).record
        back = run.layout.empty(len(one.tokens))
        engine.transport.get(record, run.layout.views(back))
        given = processor.inputs(one.tokens, one.images)
        entered = target.model(one.tokens[None], output_hidden_states=True, **given).hidden_states[0][0]
        assert back.embedded is not None
        assert torch.equal(back.embedded, entered)
        assert back.places is not None
        places = places_of(target, one.tokens, given)
        assert torch.equal(back.places.long(), places)
        # A small picture may take one place, as a word does.
        moved += bool((places != torch.arange(len(one.tokens)).unsqueeze(1)).any())
        shown = torch.isin(one.tokens, media)
        assert bool(shown.any()) == bool(one.images)
        if one.images:
            table = target.model.get_input_embeddings()(one.tokens)
            assert torch.equal(entered[~shown], table[~shown])
            assert (entered - table)[shown].abs().amax(-1).min() > 1e-3
            seen += 1
    assert seen
    assert bool(moved) == hasattr(target.model.base_model, "get_rope_index")


def places_of(target: TargetModel, tokens: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """`[T, 3]` by the family's own count."""
    model: Any = target.model.base_model
    if not given or not hasattr(model, "get_rope_index"):
        return torch.arange(len(tokens)).unsqueeze(1).expand(-1, 3)
    wanted = {name: given[name] for name in ("mm_token_type_ids", "image_grid_thw")}
    return model.get_rope_index(tokens[None], **wanted)[0][:, 0].T


def test_wrong_embeddings_of_an_image_do_not_pass_the_canary(seeing_run: Callable[..., RunFolder]) -> None:
    run = PreparedRun.open(seeing_run("qwen2_5_vl", draft=EAGLE3).path)
    engine = PlainEngine(run)
    (one,) = (one for one in run.open_samples().canaries(32) if one.images)
    prefill = engine.prefill

    def moved(*arguments: Any) -> HiddenStates:
        hidden = prefill(*arguments)
        assert hidden.embedded is not None
        return replace(hidden, embedded=hidden.embedded.roll(1, 0))

    engine.prefill = moved  # type: ignore[method-assign]
    with pytest.raises(Refusal, match="first layer reads of an image differs"):
        engine.check_canary(one.tokens, one.images)


AXES = EAGLE3[:-1] + ", mrope_section: [2, 1, 1]}"
STORED = ("float32", "bfloat16", "float8")


@pytest.mark.parametrize(
    ("family", "draft", "stored"),
    [
        ("qwen3_5", MTP, "float32"),
        ("qwen2_5_vl", AXES, "float8"),
        *[
            pytest.param("qwen2_5_vl", draft, stored, marks=pytest.mark.long)
            for draft, stored in ((MEDUSA, "float32"), *[(EAGLE3, one) for one in STORED], (AXES, "float32"))
        ],
    ],
)
def test_a_run_with_images_trains_and_is_measured_on_them(
    family: str,
    draft: str,
    stored: str,
    seeing_run: Callable[..., RunFolder],
    run_to_the_end: Callable[[RunFolder], None],
) -> None:
    layers = ["target.aux_layer_ids=[]"] if draft == MTP else []
    if stored == "bfloat16":
        layers += ["generator.compute_dtype=bfloat16"]
    folder = seeing_run(family, *layers, "training.epochs=3", f"generator.stored_dtype={stored}", draft=draft)
    run_to_the_end(folder)
    texts = read_heldout(folder.heldout)
    assert texts is not None
    assert {text.shown for text in texts} == {True, False}
    assert all((text.embedded is not None) == (text.shown and draft != MEDUSA) for text in texts)
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert any(HELDOUT_LENGTH in line and HELDOUT_SEEN in line for line in lines)
