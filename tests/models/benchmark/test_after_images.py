"""The gate's ground of prompts with images."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from scipy.stats import chisquare

from infra.files.run_folder import RunFolder
from models.benchmark.after_images import GROUND, image_prompts, measure_after_images
from models.benchmark.contestants import draft_of, load_contestants
from models.benchmark.measure import DRAFT, LEAST_CONVERSATIONS, PROMPT_LOOKUP, at
from models.benchmark.run import benchmark_run
from models.capture.plain_engine import PlainEngine
from models.data.images import ImageProcessor
from models.data.prompts import seen_prompts
from models.decoding.acceptance import acceptance_length
from models.decoding.after_images import continue_seen
from models.drafts.sampling import Sampling
from models.export.served_target import read_served_target
from models.export.sglang import write_export
from models.run import PreparedRun
from tests.models.seeing_drafts import DRAFT as BY_HEART
from tests.models.seeing_drafts import LOOKAHEAD, learned_by_heart, sample_of, walk

WORDS, DRAWS = 24, 600


@pytest.fixture
def exported(seeing_run: Callable[..., RunFolder]) -> Callable[..., PreparedRun]:
    """A run whose draft took `steps` on the target's answers about some images; after 150 it knows them by heart."""

    def make(family: str, sampling: str, conversations: int = 96, steps: int = 1) -> PreparedRun:
        settings = [f"benchmark.max_new_tokens={WORDS}", f"benchmark.lookahead={LOOKAHEAD}", "benchmark.loads=[]"]
        settings += [f"promotion.traffic.sampling={sampling}", "benchmark.served_concurrency=[]"]
        folder = seeing_run(family, *settings, draft=BY_HEART, conversations=conversations)
        run = PreparedRun.open(folder.path)
        engine, media = PlainEngine(run), torch.tensor(run.target.media_ids)
        prompts = seen_prompts(run.open_samples("heldout"), 4, run.samples.longest)
        texts = engine.continue_greedily(prompts, WORDS)
        draft = learned_by_heart(
            run, [sample_of(engine, *pair, media) for pair in zip(prompts, texts, strict=True)], steps
        )
        write_export(draft, run.folder.export, {}, read_served_target(Path(run.target.path)))
        return run

    return make


@pytest.mark.parametrize("family", ["qwen2_5_vl", pytest.param("gemma3", marks=pytest.mark.long)])
def test_walks_after_images_are_those_of_captured_texts(family: str, exported: Callable[..., PreparedRun]) -> None:
    run = exported(family, "greedy", steps=150)
    prompts, media = image_prompts(run), torch.tensor(run.target.media_ids)
    assert len(prompts) >= LEAST_CONVERSATIONS
    contestants = load_contestants(Path(run.target.path), [run.folder.export], torch.float32, sees=True)
    found = measure_after_images(run, contestants, prompts)
    texts = PlainEngine(run).continue_greedily(prompts, WORDS)
    assert found.texts == [list(text.continuation) for text in texts]
    assert at(found.walks[DRAFT], LOOKAHEAD) == [walk(draft_of(contestants.draft), text, media) for text in texts]
    assert acceptance_length(at(found.walks[DRAFT], LOOKAHEAD)[:4]) > 1.3
    assert len(found.walks[PROMPT_LOOKUP]) == len(prompts)
    assert not found.drawn


def test_sampled_texts_and_walks_follow_from_the_seed(exported: Callable[..., PreparedRun]) -> None:
    run = exported("qwen2_5_vl", "sampled")
    contestants = load_contestants(Path(run.target.path), [run.folder.export], torch.float32, sees=True)
    prompts = image_prompts(run)
    found, again = (measure_after_images(run, contestants, prompts) for _ in range(2))
    assert found.texts == again.texts
    assert [len(walks) for walks in (found.walks[DRAFT], found.drawn[DRAFT])] == [len(prompts)] * 2
    assert found.drawn.keys() == {DRAFT}


def test_texts_about_images_are_drawn_by_the_law_of_all_others(seeing_run: Callable[..., RunFolder]) -> None:
    run = PreparedRun.open(seeing_run("qwen2_5_vl").path)
    engine, law = PlainEngine(run), Sampling(temperature=0.8, top_p=0.9, top_k=5)
    (prompt,) = seen_prompts(run.open_samples("heldout"), 1, run.samples.longest)
    tokens = torch.tensor(prompt.tokens)
    expected = law.distribution(engine.target.logits(engine.prefill(tokens, prompt.images).last[-1:]))[0]
    seen = ImageProcessor(Path(run.target.path)).inputs(tokens, prompt.images)
    drawing = law.seeded(7, engine.target.device)
    drawn = [continue_seen(engine.target, tokens, seen, 1, frozenset(), drawing)[0] for _ in range(DRAWS)]
    counts = torch.bincount(torch.tensor(drawn), minlength=len(expected))
    kept = expected > 0
    assert 2 <= int(kept.sum()) <= 5
    assert not counts[~kept].any()
    wanted = expected[kept].double() / expected[kept].double().sum() * DRAWS
    assert chisquare(counts[kept].numpy(), wanted.numpy()).pvalue > 1e-3


def test_the_gate_has_a_ground_of_prompts_with_images(
    exported: Callable[..., PreparedRun], capsys: pytest.CaptureFixture[str]
) -> None:
    run = exported("qwen2_5_vl", "sampled")
    result = benchmark_run(run, None, "champion")
    count = len(image_prompts(run))
    (suite,) = result.suites
    assert (suite.name, suite.whole.conversations) == (GROUND, count)
    assert GROUND in run.folder.gate.read_text()
    few = exported("qwen2_5_vl", "sampled", conversations=20)
    capsys.readouterr()
    assert not image_prompts(few)
    assert f"and {LEAST_CONVERSATIONS} are needed" in capsys.readouterr().out
    assert not benchmark_run(few, None, "champion").suites
