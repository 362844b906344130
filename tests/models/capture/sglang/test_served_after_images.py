"""A draft that learned from images, served by a real SGLang: its steps after an image are those of the walk."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from infra.files.atomic import write_atomically
from models.benchmark.served import counts_of, setup_of
from models.capture.engine import Continued, Prompt
from models.capture.heldout import seen_prompts
from models.capture.plain_engine import PlainEngine
from models.capture.sglang.engine import asked_with
from models.data.prepare import prepare_samples
from models.decoding.acceptance import AcceptedCounts, acceptance_length
from models.decoding.simulated import simulate
from models.drafts.base import Draft, PackedSamples, TargetProjection
from models.drafts.registry import build_draft
from models.drafts.vocabulary import DraftVocabulary
from models.export.served_target import read_served_target
from models.export.sglang import write_export
from models.run import PreparedRun
from models.targets.weights import read_target_head
from tests.models.capture.test_images_captured import SETTINGS, write_source
from tests.models.seeing_targets import seeing_target

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LOOKAHEAD, STEPS, WORDS = 3, 150, 40
DRAFT = "draft={method: eagle3, vocab_size: null, num_heads: 2, num_kv_heads: 2, head_dim: 8, intermediate_size: 32}"
MORE = [f"benchmark.lookahead={LOOKAHEAD}", f"benchmark.max_new_tokens={WORDS}", "benchmark.served_concurrency=[1]"]


def learned_by_heart(run: PreparedRun, texts: list[Continued], samples: list[PackedSamples]) -> Draft:
    head = read_target_head(Path(run.target.path), torch.float32)
    every = DraftVocabulary(torch.arange(run.target.vocab_size), run.target.vocab_size)
    torch.manual_seed(0)
    draft = build_draft(run.config.draft, head.embedding, every, run.config.target.aux_layer_ids)
    draft.start_from(head.head)
    target = TargetProjection(head.head, None, head.logit_scale, head.soft_cap)
    batch = joined(samples)
    total = int(batch.loss_mask.sum())
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=5e-3)
    for _ in range(STEPS):
        draft.loss(batch, target, total, 256).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return draft.eval()


def joined(samples: list[PackedSamples]) -> PackedSamples:
    names = ("tokens", "loss_mask", "aux", "last", "embedded", "shown", "places")
    parts: dict[str, Tensor] = {name: torch.cat([getattr(one, name) for one in samples]) for name in names}
    return PackedSamples(lengths=tuple(one.lengths[0] for one in samples), **parts)


def sample_of(engine: PlainEngine, prompt: Prompt, text: Continued, media: Tensor) -> PackedSamples:
    read = torch.tensor([*text.prompt, *text.continuation][:-1])
    hidden = engine.prefill(read, prompt.images)
    learned = torch.arange(len(read)) >= len(text.prompt)
    return PackedSamples(
        read, learned, hidden.aux, hidden.last, (len(read),), embedded=hidden.embedded, places=hidden.places,
        shown=torch.isin(read, media),
    )  # fmt: skip


def walk(draft: Draft, text: Continued, media: Tensor) -> AcceptedCounts:
    assert text.embedded is not None
    assert text.places is not None
    shown = torch.isin(torch.tensor([*text.prompt, *text.continuation]), media)
    source = draft.after_images(text.embedded, text.places, shown)
    return simulate(source, text.prompt, text.continuation, text.aux, LOOKAHEAD)[-1]


def test_steps_after_an_image_are_those_of_the_walk(
    sglang_run: Callable[..., PreparedRun], tiny_target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("SGLANG_PLATFORM", "draftsmith_test_cpu")
    target = seeing_target("qwen3_vl", tmp_path / "target", tiny_target.path)
    data = [f"data.source={write_source(tmp_path)}", f"data.images={tmp_path / 'pictures'}"]
    for path in (tmp_path / "pictures").iterdir():
        # Of a size that nobody scales: SGLang would round pixels otherwise.
        Image.open(path).resize((64, 96)).save(path)
    run = sglang_run(DRAFT, *data, *SETTINGS, *MORE, target=target)
    write_atomically(run.folder.samples, prepare_samples(run.config.data, target, run.config.target.add_bos))
    run = PreparedRun.open(run.folder.path)
    engine, media = PlainEngine(run), torch.tensor(target.media_ids)
    prompts = seen_prompts(run.open_samples(), 6, run.samples.longest)
    texts = engine.continue_greedily(prompts, WORDS)
    samples = [sample_of(engine, prompt, text, media) for prompt, text in zip(prompts, texts, strict=True)]
    draft = learned_by_heart(run, texts, samples)
    expected = [walk(draft, text, media) for text in texts]
    assert acceptance_length(expected) > 1.3
    blind = [simulate(draft, t.prompt, t.continuation, t.aux, LOOKAHEAD)[-1] for t in texts]
    assert all(sorted(one.accepted) != sorted(two.accepted) for one, two in zip(blind, expected, strict=True))
    write_export(draft, tmp_path / "export", {}, read_served_target(Path(target.path)))
    with replace(setup_of(run), max_new_tokens=WORDS).serving(tmp_path / "export", LOOKAHEAD) as client:
        for prompt, text, counts in zip(prompts, texts, expected, strict=True):
            asked, more = asked_with(torch.tensor(prompt.tokens), prompt.images, target.media_ids)
            answer = client.generate(asked, setup_of(run).greedy, in_steps=True, **more)
            assert answer.tokens == list(text.continuation)
            # The server may send steps together: their order is lost then.
            assert sorted(counts_of(answer, LOOKAHEAD).accepted) == sorted(counts.accepted)
