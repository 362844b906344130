"""Samples with images in a real SGLang server: its own processor expands them, and the states are the target's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.files.atomic import write_atomically
from models.capture.sglang.engine import SGLangEngine
from models.data.images import ImageProcessor
from models.data.media import Prompt
from models.data.prepare import prepare_samples
from models.data.prompts import seen_prompts
from models.run import PreparedRun
from models.targets.model import TargetModel
from tests.models.seeing_targets import EAGLE3, MEDUSA, SETTINGS, seeing_target, write_source

CHUNK = 32

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("family", "draft"), [pytest.param("qwen3_vl", MEDUSA, marks=pytest.mark.long), ("qwen3_vl", EAGLE3)]
)
def test_captured_states_are_the_targets_own(
    family: str,
    draft: str,
    sglang_run: Callable[..., PreparedRun],
    engine_of: Callable[..., SGLangEngine],
    tiny_target: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    target = seeing_target(family, tmp_path / family, tiny_target.path)
    source = write_source(tmp_path)
    data = [f"data.source={source}", f"data.images={tmp_path / 'pictures'}"]
    # Images are divided among chunks.
    chunks = [f"generator.sglang.chunked_prefill_tokens={CHUNK}"] if draft == EAGLE3 else []
    run = sglang_run(draft, *data, *SETTINGS, *chunks, target=target)
    record = prepare_samples(run.config.data, target, run.config.target.add_bos)
    write_atomically(run.folder.samples, record)
    run = PreparedRun.open(run.folder.path)
    engine, samples = engine_of(run), run.open_samples()
    for one in samples.canaries(32):
        engine.check_canary(one.tokens, one.images)
    reference = TargetModel.load(Path(target.path), (0, 1, 2), torch.float32, sees=True)
    processor, moved = ImageProcessor(Path(target.path)), 0
    for index in range(len(samples)):
        one = samples[index]
        captured = engine.capture(f"images/{index}", one.tokens, one.images).record
        back = run.layout.empty(len(one.tokens))
        engine.transport.get(captured, run.layout.views(back))
        own = reference.forward(one.tokens[None], seen=processor.inputs(one.tokens, one.images), embedded=True)
        pairs = [(back.aux, own.aux[0]), (back.last, own.last[0])]
        if draft == EAGLE3 and one.images:
            assert back.embedded is not None
            assert own.embedded is not None
            pairs.append((back.embedded, own.embedded[0]))
            assert back.places is not None
            assert own.places is not None
            assert torch.equal(back.places, own.places[0])
            # A small picture may take one place, as a word does.
            moved += bool((back.places != torch.arange(len(one.tokens)).unsqueeze(1)).any())
        for found, expected in pairs:
            error = (found - expected).norm() / expected.norm()
            # Pixels are rounded otherwise: torchvision scales them there, Pillow here.
            assert error <= (0.02 if one.images else 1e-4)
    assert moved or draft != EAGLE3
    shown = seen_prompts(run.open_samples("heldout"), 2, run.samples.longest)
    texts = engine.continue_greedily([*shown, Prompt((0, 5, 9))], 4)
    assert [one.shown for one in texts] == [True] * len(shown) + [False]
    for prompt, text in zip(shown, texts, strict=False):
        read = torch.tensor([*text.prompt, *text.continuation][:-1])
        own = reference.forward(read[None], seen=processor.inputs(read, prompt.images), embedded=True)
        assert own.places is not None
        if draft == EAGLE3:
            assert text.places is not None
            assert torch.equal(text.places, own.places[0])
