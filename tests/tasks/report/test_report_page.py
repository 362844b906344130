"""`report.html`: every figure is on it, it needs nothing but itself, and nothing in it is taken for markup."""

import base64
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.status_command import describe
from infra.data_plane.bottleneck import in_words
from infra.files.atomic import write_atomically
from infra.ledger.answers import Quarantined
from infra.records.acceptance import BenchmarkResult, DivergenceRecord, LosslessRecord, RegisteredDraft
from infra.records.data_path import (
    GeneratorsChange,
    MoreData,
    SampleProgress,
    SamplesRecord,
    TargetRecord,
    TrainingResult,
)
from infra.tracking.runs import TrackedRun
from models.config.data import RegenerationConfig
from models.config.recipe import RunConfig, load_recipe
from tasks.plan import plan_recipe
from tasks.report.meaning import answer
from tasks.report.page import Link, RunFacts, run_html, run_markdown
from tasks.report.write import write_files
from tasks.run import OpenRun

ROOT = Path(__file__).parents[3]
HOSTILE = "<script>alert('x')</script>\"><img src=http://evil.example/x onerror=alert(1)>&amp;"


class Page(HTMLParser):
    """What a browser would make of it: tags with attributes, text, and the text of each section."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text = self.style = ""
        self.paragraphs: dict[str, list[str]] = {}
        self.recipe = ""
        self._section, self._open = "", []
        self.feed(html)
        self.close()
        self.text = " ".join(self.text.split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.tags.append((tag, attributes))
        if tag not in ("meta", "img"):
            self._open.append(tag)
        if tag == "section":
            self._section = attributes["id"]
        if tag == "p":
            self.paragraphs.setdefault(self._section, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag
        if tag not in ("code", "a"):
            self.text += " "

    def handle_data(self, data: str) -> None:
        if "style" in self._open:
            self.style += data
            return
        self.text += data
        if "p" in self._open:
            self.paragraphs[self._section][-1] += data
        if "pre" in self._open:
            self.recipe += data

    def values(self, *names: str) -> Iterator[tuple[str, str]]:
        for tag, attributes in self.tags:
            for name in names:
                if name in attributes:
                    yield tag, attributes[name]


@pytest.fixture
def facts(target: TargetRecord, samples: SamplesRecord, trained: TrainingResult, result: BenchmarkResult) -> RunFacts:
    draft = RegisteredDraft(name="draft-tiny", version=3, model_id="m", aliases=("champion",), tags={"replaces": "2"})
    return RunFacts(
        run="tiny-1", config=load_recipe(ROOT / "recipes" / "tiny.yaml"), target=target,
        samples=samples, trained=trained, result=result, draft=draft,
        progress=SampleProgress(consumed=80, quarantined=2),
        quarantined=[Quarantined(0, 17, 4711, "out of memory"), Quarantined(1, 18, 42, "a canary failed")],
        written=datetime(2026, 1, 2, 3, 4, tzinfo=UTC), git_sha="abc123",
        links=(Link("MLflow run", "http://mlflow/#/r", "http://mlflow/#/r"), Link("Logs", "logs", "logs")),
    )  # fmt: skip


def page(facts: RunFacts, run: OpenRun) -> Page:
    return Page(run_html(facts, run.folder.plots))


def test_only_engines_that_read_the_draft_are_named(facts: RunFacts, run: OpenRun) -> None:
    """As a Medusa draft is read by none, and an EAGLE-3 draft whose proposals never pay has no settings for vLLM."""
    served = page(replace(facts, settings_for=("SGLang",)), run).text
    assert "The folder export/serving holds the same as settings of SGLang." in served
    assert "vLLM" not in served
    assert "the draft that serving takes from now on" in served
    unserved = replace(facts, is_served=False)
    shown = page(unserved, run).text
    assert "No serving engine reads this draft, so these are figures of Draftsmith's own decoder." in shown
    for text in (shown, run_markdown(unserved)):
        assert "is the champion, although no serving engine reads this draft" in text
        assert "serving takes" not in text


def test_text_that_the_target_wrote_is_told_of(facts: RunFacts, run: OpenRun) -> None:
    assert "Answers" not in page(facts, run).text
    answered = facts.config.model_copy(
        update={"data": facts.config.data.model_copy(update={"regeneration": RegenerationConfig(max_new_tokens=48)})}
    )
    before = page(replace(facts, config=answered), run).text
    assert "Answers The target's own, at temperature 0.7, of at most 48 tokens. " in before
    partly = replace(facts, config=answered, samples=facts.samples.model_copy(update={"unanswered": 163}))
    shown = page(partly, run).text
    assert "of at most 48 tokens; 163 samples answered while captured." in shown
    assert "Training tokens at most 7,890,123 per epoch" in shown


def test_it_needs_nothing_but_itself(facts: RunFacts, run: OpenRun) -> None:
    shown = page(facts, run)
    assert not {tag for tag, _ in shown.tags} & {"script", "link", "iframe", "object", "embed", "base", "form"}
    loaded = list(shown.values("src", "srcset", "poster", "data", "action", "background"))
    assert [tag for tag, _ in loaded] == ["img"]
    assert all(value.startswith("data:image/png;base64,") for _, value in loaded)
    assert list(shown.values("href")) == [("a", "http://mlflow/#/r"), ("a", "logs")]
    assert not re.search(r"url\(|@import|https?:", shown.style)
    assert not list(shown.values("style", "onload", "onclick", "onerror"))


def test_plots_are_inside(facts: RunFacts, run: OpenRun) -> None:
    (run.folder.plots / "loss_by_rank.png").write_bytes(b"another")
    pictures = [value for _, value in page(facts, run).values("src")]
    inside = {base64.b64decode(value.partition(",")[2]) for value in pictures}
    assert inside == {file.read_bytes() for file in run.folder.plots.iterdir()}
    assert len(inside) == 2


def test_every_figure_is_there(facts: RunFacts, run: OpenRun) -> None:
    text = page(facts, run).text
    shown = [
        "tiny-1", "EAGLE-3 draft for tiny", "2026-01-02 03:04 UTC", "version 3", "draft-tiny, champion",
        "3.50", "2.50", "2.10", "1.20", "1.50", "50 tokens/s plain at batch 1, not published speculative",
        "Lossless yes, 1,000 tokens equal the target's own text, with 0 mismatches and 1 tie",
        "identical step by step in 4 conversations", "+250.0% against no draft, at least +200.0%", "10.0%",
        "40.0% distinct tokens (within 128) when greedy, 70.0% when sampled",
        "1,000", "20", "10 s", "100 tokens/s", "0.5 s (5.0%)", "1.25", "0.51, 0.32", "91.2%", "2 generators",
        "80 of 82 samples trained on, 2 quarantined.",
        "1,234", "7,890,123 per epoch", "56", "255 tokens", "98.7%", "11", "22", "33", "44", "55",
        "95.6% of the supervised tokens, 91.2% of the positions trained on",
        "66 documents left out that hold one of 77, exactly or nearly", "in 88 samples, data.thinking=keep", "c0ffee",
        "abc123", "http://mlflow/#/r", "with 1 text at once propose 3 tokens (2.50 times the target alone)", "+150.0%",
    ]  # fmt: skip
    assert [figure for figure in shown if figure not in text] == []


def test_what_was_not_measured_is_not_shown(facts: RunFacts, run: OpenRun) -> None:
    older = replace(
        facts,
        samples=facts.samples.model_copy(update={"compared_prompts": 0}),
        trained=facts.trained.model_copy(update={"token_coverage": None}),
    )
    text = page(older, run).text
    assert "none were given to look for" in text
    assert "Draft vocabulary holds 91.2% of the positions trained on" in text


def test_what_twice_the_data_would_bring(facts: RunFacts, run: OpenRun) -> None:
    for more, text in (
        (MoreData(lower=0.08, upper=0.12), "Twice the data +0.08 to +0.12 tokens per verification step"),
        (MoreData(why="too few measurements"), "Twice the data Not known what it would bring: too few measurements"),
    ):
        known = replace(facts, trained=facts.trained.model_copy(update={"more_data": more}))
        assert text in page(known, run).text
        assert known.findings["Twice the data"] == more.in_words
    assert "Twice the data" not in page(facts, run).text


def test_memory_of_gpus_is_shown_where_there_are_some(facts: RunFacts, run: OpenRun) -> None:
    assert "GPU memory" not in page(facts, run).text
    with_gpus = facts.trained.model_copy(update={"peak_gpu_bytes": 67 * 2**30})
    assert "GPU memory of a rank, at most 67 GiB" in page(replace(facts, trained=with_gpus), run).text


def test_it_says_how_many_generators_there_were_at_a_time(facts: RunFacts, run: OpenRun) -> None:
    changes = tuple(GeneratorsChange(at=float(n), generators=n, why="") for n in (2, 3, 1))
    assert "1 to 3 generators, 1 rank" in page(replace(facts, generators=changes), run).text


def test_it_says_which_side_is_slow(facts: RunFacts, run: OpenRun) -> None:
    (words,) = page(facts, run).paragraphs["training"]
    assert words.lower() == f"{in_words(facts.trained.rates)}.".lower()
    assert words.startswith("Training is the slow side")


def test_the_plan_is_held_against_what_was_measured(facts: RunFacts, run: OpenRun) -> None:
    assert "Plan, split" not in page(facts, run).text
    planned = replace(facts, plan=plan_recipe(facts.config, None, facts.samples))
    text = page(planned, run).text
    assert "Plan, inference" in text
    assert "No other one of 2 cores is better than 1 + 1" in text
    assert "plan, split: no other one of 2 cores" in run_markdown(planned).lower()


def test_all_conditions_are_listed(facts: RunFacts, run: OpenRun) -> None:
    different = {"prompts": 31, "prompt_tokens": 61, "max_new_tokens": 71, "topk": 3, "concurrency": 5, "threads": 7}
    texts = {"engine": "transformers", "versions": {"torch": "2.13", "mlflow": "3.17"}, "thinking": True}
    conditions = facts.result.conditions.model_copy(update={**different, **texts, "sampled_top_p": 0.95})
    text = page(replace(facts, result=facts.result.model_copy(update={"conditions": conditions})), run).text
    shown = conditions.model_dump() | {"versions": "torch 2.13, mlflow 3.17", "thinking": "yes"}
    shown |= {"temperature": "0", "sampled_temperature": "1", "quantization": "none"}
    lines = [f"{name.replace('_', ' ')} {value}" for name, value in shown.items()]
    assert len(lines) == len(type(conditions).model_fields) >= 18
    assert [line for line in lines if line not in text] == []
    assert "Text sampled at temperature 1, top-p 0.95" in text


def test_the_recipe_can_be_read_back_and_hides_passwords(facts: RunFacts, run: OpenRun) -> None:
    ledger = facts.config.ledger.model_copy(update={"url": "postgresql://me:secret@db/x"})
    shown = page(replace(facts, config=facts.config.model_copy(update={"ledger": ledger})), run)
    assert "secret" not in shown.text
    assert "postgresql://me:***@db/x" in shown.recipe
    assert RunConfig.model_validate(yaml.safe_load(page(facts, run).recipe)) == facts.config


@pytest.mark.parametrize("passed", [True, False])
@pytest.mark.parametrize("beats", [True, False])
def test_three_sentences_say_what_it_means(facts: RunFacts, run: OpenRun, passed: bool, beats: bool) -> None:
    told = {"passed": passed, "reason": "against no draft: +1.0%, too little"}
    gate = facts.result.gate.model_copy(update=told | ({} if beats else {"instead": "prompt lookup"}))
    best = facts.result.prompt_lookup.model_copy(update={"length": {1: 1.5, 4: 3.6}})
    changes = {} if beats else {"prompt_lookup": best}
    result = facts.result.model_copy(update={"gate": gate, **changes})
    shown = page(replace(facts, result=result), run)
    sentences = shown.paragraphs["meaning"]
    assert len(sentences) == 3
    assert all(re.findall(r"[.!?](?=\s|$)", words) == ["."] and words.endswith(".") for words in sentences)
    good, compared, after = sentences
    assert "3.50 tokens per verification step at lookahead 4" in good
    assert ("It beats prompt lookup (2.10), Token Recycling (1.90) and suffix decoding (1.80)" in compared) == beats
    assert ("prompt lookup is the better choice" in compared) == (not beats)
    assert (shown.text.count("✓ beaten"), shown.text.count("✗ not beaten")) == ((3, 0) if beats else (2, 1))
    assert ("✓ passed" in shown.text, "✗ not passed" in shown.text) == (passed, not passed)
    assert ("The gate is passed" in after) == passed
    assert ("too little" in after) == (not passed)


def test_quarantined_samples_are_listed_with_their_errors(facts: RunFacts, run: OpenRun) -> None:
    text = page(facts, run).text
    assert "0 17 4711 out of memory 1 18 42 a canary failed" in text
    none = page(replace(facts, quarantined=[], progress=SampleProgress(consumed=80)), run)
    assert "80 of 80 samples trained on, none quarantined." in none.text
    assert "could not be captured" not in none.text


def test_text_from_outside_stays_text(facts: RunFacts, run: OpenRun) -> None:
    result = facts.result.model_copy(
        update={
            "conditions": facts.result.conditions.model_copy(update={"target": HOSTILE, "hardware": HOSTILE}),
            "gate": facts.result.gate.model_copy(update={"reason": HOSTILE, "against": HOSTILE}),
        }
    )
    hostile = replace(
        facts,
        run=HOSTILE,
        git_sha=HOSTILE,
        result=result,
        target=facts.target.model_copy(update={"name": f"`{HOSTILE}`", "licence": HOSTILE}),
        draft=facts.draft.model_copy(update={"name": HOSTILE}),
        quarantined=[Quarantined(0, 1, 2, HOSTILE)],
        links=[Link(HOSTILE, HOSTILE)],
    )
    before, after = page(facts, run), page(hostile, run)
    assert not {tag for tag, _ in after.tags} - {tag for tag, _ in before.tags} - {"code"}
    assert list(after.values("src")) == list(before.values("src"))
    assert after.text.count(HOSTILE) > 8


def test_what_is_not_lossless_is_shown_in_full(facts: RunFacts, run: OpenRun) -> None:
    places = (
        DivergenceRecord(position=31, token=5, gap=2e-4, delta=1e-3, tie=True),
        DivergenceRecord(position=77, token=None, gap=None, delta=1e-3, tie=False),
    )
    lossless = LosslessRecord(tokens=1000, mismatches=1, ties=1, divergences=places)
    text = page(replace(facts, result=facts.result.model_copy(update={"lossless": lossless})), run).text
    assert "Lossless NO, 1 mismatch and 1 tie in 1,000 tokens" in text
    assert "tie 31 2.00e-04 1.00e-03 mismatch 77 one text ends 1.00e-03" in text


NGRAM = ("--speculative-algorithm", "NGRAM")


@pytest.mark.parametrize(
    ("changes", "said", "what"),
    [
        ({"passed": True, "load": 4}, "Better than every rival", "second of prompt lookup with 4 texts at once"),
        ({"passed": False, "load": None, "margin": 0.3}, "Not promoted", "verification step of prompt lookup"),
        ({"passed": False, "load": 1, "instead": "no draft"}, "Serve without a draft: the draft", "second of prompt"),
        (
            {"passed": False, "load": 1, "instead": "prompt lookup", "instead_arguments": NGRAM},
            "Serve with prompt lookup instead (--speculative-algorithm NGRAM): the draft gives",
            "second of prompt lookup with 1 text at once",
        ),
    ],
)
def test_it_opens_with_the_answer(facts: RunFacts, run: OpenRun, changes: dict[str, Any], said: str, what: str) -> None:
    figures = {"against": "prompt lookup", "challenger": 3.0, "champion": 2.0, "lower_bound": 0.2, "grounds": ()}
    gate = facts.result.gate.model_copy(update=figures | changes)
    shown = page(replace(facts, result=facts.result.model_copy(update={"gate": gate})), run).paragraphs[""][-1]
    assert shown.startswith(said)
    needed = ", and more than 1.3 times is needed" if "margin" in changes else ""
    sure = f"on greedy text; at least 1.20 times with 97.5% confidence{needed}."
    assert f" 1.50 times the tokens per {what}" in shown
    assert shown.endswith(sure)


def test_status_tells_the_same(facts: RunFacts, run: OpenRun, tracking: TrackedRun) -> None:
    assert tracking.uri == run.tracking_uri, "which is asked what serves"
    facts = replace(facts, result=facts.result.model_copy(update={"traffic": "sampled"}))
    write_files(run, facts)
    for record in ("target", "samples", "training", "exported"):
        getattr(run.folder, record).write_text("{}")
    write_atomically(run.folder.benchmark, facts.result)
    told = dict(describe(run.folder, run.config))
    assert told["draft"] == (
        "version 3 of draft-tiny (no longer registered), acceptance length 2.50 at lookahead 4 on text sampled at "
        "temperature 1"
    )
    assert told["gate"] == answer(facts.result)
    assert told["report"] == str(run.folder.report_page)


def test_a_draft_that_accepts_more_but_is_slower_is_no_plain_success(facts: RunFacts, run: OpenRun) -> None:
    assert "predicted to be faster" not in answer(facts.result)
    found = facts.result.goodput
    assert found is not None
    dear = found.model_copy(update={"main_load": 16})
    said = answer(facts.result.model_copy(update={"goodput": dear}))
    assert said.endswith(". But with 16 texts at once the target alone is predicted to be faster.")


def test_it_opens_with_what_blocks_a_draft_that_is_better(facts: RunFacts, run: OpenRun) -> None:
    blocked = {"passed": False, "lower_bound": 0.2, "margin": 0.01, "reason": "speculative decoding is not lossless"}
    gate = facts.result.gate.model_copy(update=blocked)
    shown = page(replace(facts, result=facts.result.model_copy(update={"gate": gate})), run).paragraphs[""][-1]
    assert shown == "Not promoted: speculative decoding is not lossless."


def luminance(colour: str) -> float:
    """WCAG 2.2, relative luminance, of `#rgb` or `#rrggbb`."""
    digits = colour.removeprefix("#")
    digits = digits if len(digits) == 6 else "".join(2 * digit for digit in digits)
    parts = (int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4))
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_every_text_stands_out_from_what_is_behind_it(facts: RunFacts, run: OpenRun) -> None:
    palettes = re.findall(r":root \{(.*?)\}", page(facts, run).style, re.DOTALL)
    assert len(palettes) == 3, "light, dark, printed"
    for palette in palettes:
        colours = {name: luminance(value) for name, value in re.findall(r"--(\w+): (#\w+);", palette)}
        for text in ("ink", "soft", "good", "bad", "link"):
            for behind in ("paper", "tint", "mark"):
                dark, light = sorted((colours[text], colours[behind]))
                assert (light + 0.05) / (dark + 0.05) >= 4.5, (text, behind)  # WCAG 2.2, AA
