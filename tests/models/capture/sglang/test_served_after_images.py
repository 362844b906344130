"""A draft that learned from images, served by a real SGLang: its steps after an image are those of the walk."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from infra.files.atomic import write_atomically
from models.benchmark.served import counts_of, setup_of
from models.capture.plain_engine import PlainEngine
from models.data.images import asked_with
from models.data.prepare import prepare_samples
from models.data.prompts import seen_prompts
from models.decoding.acceptance import acceptance_length
from models.decoding.simulated import simulate
from models.export.served_target import read_served_target
from models.export.sglang import write_export
from models.run import PreparedRun
from tests.models.seeing_drafts import DRAFT, LOOKAHEAD, learned_by_heart, sample_of, walk
from tests.models.seeing_targets import SETTINGS, seeing_target, write_source

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
WORDS = 40
AXES = ", mrope_section: [2, 1, 1], mrope_interleaved: true"
MORE = [f"benchmark.lookahead={LOOKAHEAD}", f"benchmark.max_new_tokens={WORDS}", "benchmark.served_concurrency=[1]"]


@pytest.mark.parametrize("axes", ["", pytest.param(AXES, marks=pytest.mark.long)])
def test_steps_after_an_image_are_those_of_the_walk(
    axes: str, sglang_run: Callable[..., PreparedRun], tiny_target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SGLANG_PLATFORM", "draftsmith_test_cpu")
    target = seeing_target("qwen3_vl", tmp_path / "target", tiny_target.path)
    data = [f"data.source={write_source(tmp_path)}", f"data.images={tmp_path / 'pictures'}"]
    for path in (tmp_path / "pictures").iterdir():
        # Of a size that nobody scales: SGLang would round pixels otherwise.
        Image.open(path).resize((64, 96)).save(path)
    run = sglang_run(DRAFT[:-1] + axes + "}", *data, *SETTINGS, *MORE, target=target)
    write_atomically(run.folder.samples, prepare_samples(run.config.data, target, run.config.target.add_bos))
    run = PreparedRun.open(run.folder.path)
    engine, media = PlainEngine(run), torch.tensor(target.media_ids)
    shown = seen_prompts(run.open_samples(), 10, run.samples.longest)
    # A text in which the target says an image's token ends there; the server, asked to go on, goes on.
    asked_for = zip(shown, engine.continue_greedily(shown, WORDS), strict=True)
    prompts, texts = zip(
        *[(prompt, text) for prompt, text in asked_for if len(text.continuation) == WORDS], strict=True
    )
    assert len(texts) > 3
    samples = [sample_of(engine, prompt, text, media) for prompt, text in zip(prompts, texts, strict=True)]
    draft = learned_by_heart(run, samples)
    expected = [walk(draft, text, media) for text in texts]
    assert acceptance_length(expected) > 1.3
    blind = [simulate(draft, t.prompt, t.continuation, t.aux, LOOKAHEAD, eos_ids=frozenset())[-1] for t in texts]
    assert [sorted(one.accepted) for one in blind] != [sorted(one.accepted) for one in expected]
    write_export(draft, tmp_path / "export", {}, read_served_target(Path(target.path)))
    with replace(setup_of(run), max_new_tokens=WORDS).serving(tmp_path / "export", LOOKAHEAD) as client:
        for prompt, text, counts in zip(prompts, texts, expected, strict=True):
            asked, more = asked_with(prompt, target.media_ids)
            answer = client.generate(asked, setup_of(run).greedy, in_steps=True, **more)
            assert answer.tokens == list(text.continuation)
            # The server may send steps together: their order is lost then.
            assert sorted(counts_of(answer, LOOKAHEAD, frozenset()).accepted) == sorted(counts.accepted)
