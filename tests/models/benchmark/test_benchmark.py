"""The whole benchmark on a tiny random target with exported, untrained drafts."""

import argparse
import json
import os
import random
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from infra.files.atomic import write_atomically
from infra.records.acceptance import BenchmarkResult, GateEvidence, RequestCounts, ServedResult
from infra.records.data_path import TargetRecord
from infra.records.goodput import MeasuredGoodput
from models.benchmark import conditions as benchmark_conditions
from models.benchmark import contestants, smoke, standalone
from models.benchmark.contestants import Contestants, SelectedLayers, load_contestants, same_build
from models.benchmark.harness import Harness, HarnessPlan, Place
from models.benchmark.harness_result import lines as lines_of
from models.benchmark.harness_result import page
from models.benchmark.harness_result import table as table_of
from models.benchmark.measure import walk_decoded
from models.benchmark.run import benchmark_run, lines, tables, terminal_table
from models.benchmark.served import serve, served_answers, served_at, speculative_arguments
from models.benchmark.smoke import smoke_test
from models.benchmark.standalone import bench
from models.benchmark.step_costs import time_steps
from models.checkpoint import AVERAGED, DRAFT, VOCABULARY, DraftDescription
from models.config.bench_arguments import bench_parser
from models.config.benchmark import TrafficConfig
from models.config.dflash import DFlashConfig
from models.config.eagle3 import Eagle3Config
from models.config.recipe import RunConfig
from models.data.prepare import prepare_samples
from models.data.prompts import SuitePrompts, heldout_prompts
from models.decoding.acceptance import AcceptedCounts, summarise
from models.decoding.prompt_lookup import PromptLookup
from models.decoding.simulated import features, simulate
from models.decoding.speculative import speculate, speculate_together
from models.drafts.base import Draft
from models.drafts.certain import ProposesCertainly
from models.drafts.registry import build_draft
from models.drafts.sampling import GREEDY, Sampling
from models.drafts.vocabulary import DraftVocabulary
from models.export.serving_settings import GOODPUT, SERVING, SGLANG
from models.export.sglang import export_checkpoint, load_draft
from models.run import PreparedRun, RunWithTarget

VOCABULARY_SIZE = 80


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A random three-layer Llama with a word-level tokenizer; loud weights, so that its text varies."""
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 2.5 / parameter.shape[-1] ** 0.5)
    folder = tmp_path / "target"
    model.save_pretrained(folder)
    words = {word: number for number, word in enumerate(["<unk>", "<eos>", *(f"w{n}" for n in range(78))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """120 plain documents of 12 to 40 words."""
    draw = random.Random(1)
    documents = [" ".join(f"w{draw.randrange(78)}" for _ in range(draw.randrange(12, 40))) for _ in range(120)]
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(documents))
    return path


def export(target: Path, folder: Path, layers: tuple[int, ...], seed: int) -> Path:
    """An untrained draft, exported."""
    torch.manual_seed(seed)
    config = Eagle3Config(vocab_size=60, num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=32, ttt_steps=2)
    vocabulary = DraftVocabulary(torch.arange(2, 62), VOCABULARY_SIZE)
    draft = build_draft(config, torch.zeros(VOCABULARY_SIZE, 32), vocabulary, layers)
    return export_draft(draft, target, folder)


def export_draft(draft: Draft, target: Path, folder: Path) -> Path:
    checkpoint = folder.with_name(f"{folder.name}-checkpoint")
    checkpoint.mkdir(parents=True, exist_ok=True)
    save_file({**draft.state_dict(), VOCABULARY: draft.vocabulary.target_ids}, checkpoint / AVERAGED)
    description = DraftDescription(
        config=draft.config.model_dump(),
        aux_layer_ids=draft.aux_layer_ids,
        target_vocab_size=VOCABULARY_SIZE,
    )
    write_atomically(checkpoint / DRAFT, description)
    export_checkpoint(checkpoint, target, folder, {})
    return folder


@pytest.fixture
def run(tmp_path: Path, target: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> PreparedRun:
    """A run folder as it is after the export."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    asked = tmp_path / "asked.jsonl"
    questions = [{"question": f"w{n} w{n + 9} w{2 * n}", "category": "few" if n < 4 else "many"} for n in range(26)]
    asked.write_text("".join(json.dumps(question) + "\n" for question in questions))
    log = tmp_path / "requests.jsonl"
    log.write_text(json.dumps({"prompt": " ".join(f"w{number}" for number in range(40))}) + "\n")
    config = RunConfig.model_validate(
        {
            "name": "bench",
            "target": {"name": str(target), "aux_layer_ids": [0, 2]},
            "data": {"source": str(text), "chat_template": "none", "heldout_share": 0.2},
            "draft": {"method": "eagle3", "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "intermediate_size": 32},
            "benchmark": {"prompts": 12, "max_new_tokens": 16, "reference_tokens": 90, "timed_tokens": 40}
            | {"suffix_log": str(log)}
            | {"sampled_temperature": 0.8, "sampled_top_p": 0.95},
            "promotion": {"suites": {"asked": str(asked)}},
        }
    )
    folder = tmp_path / "run"
    record = TargetRecord(
        name="t",
        path=str(target),
        revision="r",
        model_type="llama",
        hidden_size=32,
        num_layers=3,
        vocab_size=VOCABULARY_SIZE,
        licence="none",
    )
    write_atomically(folder / "config.json", config)
    write_atomically(folder / "target.json", record)
    write_atomically(folder / "samples.json", prepare_samples(config.data, record, add_bos=False))
    export(target, folder / "export", (0, 2), seed=1)
    rows = [
        {"step": step, "tokens": 100 * step, "loss": 5 / step, "acceptance_by_position": [0.1 * step, 0.05 * step]}
        for step in (1, 2, 3)
    ]
    rows[1]["heldout_acceptance_length"] = 1.5
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PreparedRun.open(folder)


def test_benchmark_of_a_run(run: PreparedRun, target: Path, tmp_path: Path):
    champion = export(target, tmp_path / "champion", (1,), seed=2)
    result = benchmark_run(run, champion, "version 7")
    card = (run.folder.export / "README.md").read_text()
    assert f"**{result.length:.2f} tokens per verification step" in card
    assert result.conditions.draft_revision in card
    assert BenchmarkResult.read(run.folder.benchmark) == result
    assert result.counts_identical
    assert result.counts_compared >= 5
    assert result.gap == 0.0
    assert (result.lossless.mismatches, result.lossless.ties) == (0, 0)
    assert 90 <= result.lossless.tokens < 90 + 16
    assert list(result.acceptance.length) == list(range(1, 8))
    assert list(result.reference.length) == [4]
    assert (result.conditions.sampled_temperature, result.conditions.sampled_top_p) == (0.8, 0.95)
    shown = Console(width=120, file=StringIO())
    shown.print(*tables(result))
    check_sampled(result, shown.file.getvalue())
    assert result.champion is not None
    assert 1.0 <= result.acceptance.length[4] < 1.2, "an untrained draft has nothing accepted"
    assert not result.gate.passed
    assert result.gate.against == "no draft"
    recycling, suffix = (result.more_baselines_sampled[name] for name in ("Token Recycling", "suffix decoding"))
    assert ("Token Recycling" in result.unbeaten) == (result.length <= recycling.length[4])
    assert recycling.conversations == suffix.conversations == 12
    assert list(result.more_baselines) == list(result.more_baselines_sampled)
    assert list(result.more_baselines)[2:] == ["suffix decoding, warm"]
    assert "Text sampled at temperature 0.8, top-p 0.95" in shown.file.getvalue()
    assert f"Token Recycling ({recycling.length[4]:.2f})" in result.summary
    assert result.conditions.dataset_hash == run.samples.dataset_hash
    assert result.conditions.prompts == result.acceptance.conversations == 12
    assert result.target_distinct_token_share > 0.3
    served = RequestCounts.read(run.folder.request_counts)
    assert served.conditions == result.conditions
    assert list(served.greedy) == list(served.sampled) == list(range(1, 8))
    tokens, steps = (sum(column) for column in zip(*served.greedy[4], strict=True))
    assert len(served.greedy[4]) == 12
    assert 0 <= steps - result.acceptance.steps[4] <= 12, "at most one cut step each"
    assert 1.0 <= tokens / steps <= result.acceptance.length[4] + 0.1
    assert result.speed.tokens >= 40
    assert not result.conditions.thinking
    check_goodput(result, run)
    for plot in ("acceptance_by_position.png", "goodput.png", "heldout.png", "samples.png", "training.png"):
        assert (run.folder.plots / plot).read_bytes().startswith(b"\x89PNG")


def check_sampled(result: BenchmarkResult, shown: str) -> None:
    """Both rules at every lookahead."""
    assert result.sampled is not None
    assert result.sampled_drawn is not None
    assert list(result.sampled.length) == list(result.sampled_drawn.length) == list(range(1, 8))
    assert result.sampled_drawn.length[7] >= result.sampled_drawn.length[1] > 1
    assert result.champion_sampled is not None
    assert (result.traffic, result.length) == ("sampled", result.sampled.length[4])
    assert result.conditions.proposals == "greedy"
    for rule in ("greedy proposals", "drawn proposals"):
        assert f"draft, {rule}" in shown
    assert any("likeliest tokens" in line for line in lines(result))


def check_goodput(result: BenchmarkResult, run: PreparedRun) -> None:
    """Measured, judged, and written beside the draft."""
    goodput = result.goodput
    assert goodput is not None
    assert list(goodput.draft.best) == [1, 4, 16]
    assert goodput.champion is not None
    assert goodput.champion.draft != goodput.draft.draft
    assert {each.batch for each in goodput.target_times} == {1, 2, 4, 16}
    assert {each.tokens for each in goodput.target_times} == {1, 2, 4, 8, 12, 32}
    assert [tree.batch for tree in goodput.trees] == [1, 4, 16]
    assert {each.tokens for each in goodput.draft_times} == {1, 3, 7}
    settings = run.folder.export / SERVING
    assert MeasuredGoodput.read(settings / GOODPUT) == goodput
    assert json.loads((settings / SGLANG).read_text())["lookahead"] == goodput.best.lookahead
    evidence = GateEvidence.read(run.folder.gate).goodput
    assert evidence is not None
    assert evidence.loads == goodput.by_load
    load_draft(run.folder.export, Path(run.target.path), torch.float32)  # with the settings beside it


@pytest.mark.slow
def test_the_same_run_gives_the_same_figures(run: PreparedRun, target: Path, tmp_path: Path):
    champion = export(target, tmp_path / "champion", (1,), seed=2)
    # Step costs are timings, on which the gate decides where loads are given.
    promotion = run.config.promotion.model_copy(update={"traffic": TrafficConfig(loads=())})
    run = replace(run, config=run.config.model_copy(update={"promotion": promotion}))
    first, second = (benchmark_run(run, champion, "") for _ in range(2))
    timed = {"speed", "wall_s", "goodput"}
    assert first.model_dump(exclude=timed) == second.model_dump(exclude=timed)
    judged_by_category(first)


def judged_by_category(result: BenchmarkResult) -> None:
    """The suite of questions is shown and judged by its categories."""
    (suite,) = result.suites
    assert (suite.name, suite.whole.conversations, suite.too_long) == ("asked", 26, 0)
    assert [(part.group, part.conversations) for part in suite.by_category] == [("few", 4), ("many", 22)]
    assert [part.group for part in suite.by_context] == ["1 to 128"]
    many, few = result.gate.categories
    assert (many.category, many.prompts, few.category, few.p) == ("many", 22, "few", None)
    assert many.p is not None
    said = "\n".join(lines(result))
    assert "many of asked" in said
    assert "would show" in said
    assert "by category: few" in said


def options(arguments: list[str]) -> argparse.Namespace:
    """In float32, as is not the default of every processor."""
    return bench_parser().parse_args(["--dtype", "float32", *arguments])


def test_bench_of_suites(run: PreparedRun, target: Path, text: Path, tmp_path: Path):
    champion = export(target, tmp_path / "champion", (1,), seed=2)
    arguments = ["--target", str(target), "--draft", str(run.folder.export), "--champion", str(champion)]
    arguments += ["--suite", f"asked={run.config.promotion.suites['asked']}", "--prompts", str(text)]
    arguments += [
        "--lookahead",
        "3",
        "--tree",
        "dynamic-2-2-3",
        "--batch",
        "2",
        "--timed-prompts",
        "2",
        "--num-prompts",
        "5",
    ]
    arguments += ["--verified-prompts", "5"]
    log, free = tmp_path / "requests.jsonl", ("prompt-lookup", "suffix-warm")
    log.write_text("".join(json.dumps({"prompt": line}) + "\n" for line in text.read_text().splitlines()))
    arguments += ["--suffix-log", str(log)]
    result = bench(options([*arguments, "--max-new-tokens", "6", "--baselines", "prompt-lookup"]))
    asked = [(cell.source, cell.shape, cell.conditions.temperature) for cell in result.cells if cell.suite == "asked"]
    drafts = [
        (name, shape, t) for t in (0.0, 1.0) for name in ("draft", "champion") for shape in ("3", "dynamic-2-2-3")
    ]
    assert sorted(asked) == sorted([*drafts, *((name, "3", t) for name in free for t in (0.0, 1.0))])
    assert len(result.cells) == 2 * len(asked)
    assert result.notes == tuple(f"{name} proposes chains only: no figures for dynamic-2-2-3" for name in free)
    for cell in result.cells:
        assert (cell.mismatches, cell.ties) == ((0, 0) if cell.conditions.temperature == 0 else (None, None))
        assert cell.conversations + (cell.repetitive.conversations if cell.repetitive else 0) == 5
        assert (cell.conditions.lookahead, cell.conditions.topk) == ((3, 1) if cell.shape == "3" else (2, 2))
        assert cell.conditions.concurrency == 2
        drawn = cell.conditions.temperature > 0 and cell.source not in free and cell.shape == "3"
        assert cell.conditions.proposals == ("drawn" if drawn else "greedy")
        assert (cell.conditions.draft == "none") == (cell.source in free)
        timed = (cell.suite, cell.conditions.temperature) == ("asked", 0)
        assert [(speed.batch, speed.repeats) for speed in cell.speeds] == ([(2, 3)] if timed else [])
        walked = cell.shape == "3"
        assert cell.verified == (0 if walked and cell.conditions.temperature else 5)
        assert cell.same_counts == (cell.verified if walked else None)
        assert [part.group for part in cell.by_category] == (["few", "many"] if cell.suite == "asked" else [])
    shown = page(result)
    assert "## asked" in shown
    assert "By category" in shown
    assert result.cells[0].conditions.dataset_hash in shown
    console = Console(width=200, file=StringIO())
    console.print(table_of(result, "text"))
    assert "prompt-lookup" in console.file.getvalue()
    assert result.notes[0] in list(lines_of(result))


def test_bench_samples_as_its_conditions_say(run: PreparedRun, target: Path, text: Path):
    """With a top-k of 1 sampled text is the greedy one, whatever the temperature."""
    named = {"top_k": 1, "repetition_penalty": 1.1, "eos_token_id": 1}
    (target / "generation_config.json").write_text(json.dumps(named))
    arguments = ["--target", str(target), "--draft", str(run.folder.export), "--prompts", str(text), "--baselines", ""]
    arguments += ["--lookahead", "2", "--batch", "", "--num-prompts", "4", "--max-new-tokens", "12"]
    result = bench(options(arguments))
    greedy, sampled = result.cells
    assert (sampled.conditions.sampled_temperature, sampled.conditions.sampled_top_k) == (1.0, 1)
    assert (sampled.steps, sampled.distinct_token_share) == (greedy.steps, greedy.distinct_token_share)
    assert sampled.length == pytest.approx(greedy.length)
    assert "1.1" in result.notes[0]
    alone = greedy.model_copy(update={"interval": None})
    assert alone.row["acceptance length (95 %)"] == f"{greedy.length:.2f}"


def test_bench_refuses_in_words(run: PreparedRun, target: Path, text: Path, tmp_path: Path):
    common = ["--target", str(target), "--draft", str(run.folder.export)]
    with pytest.raises(ValueError, match="export folder"):
        bench(options(["--target", str(target), "--draft", str(tmp_path), "--prompts", str(text)]))
    with pytest.raises(ValueError, match="write dynamic-5-4-16"):
        bench(options([*common, "--prompts", str(text), "--lookahead", "3;5"]))
    with pytest.raises(ValueError, match="no prompts: give --suite"):
        bench(options(common))
    for option, said in (
        ("--batch=64", "1 to 32"),
        ("--temperature=-1", "from 0 on"),
        ("--temperature=nan", "from 0 on"),
        (f"--prompts={text}", "two suites are named"),
        ("--chat-template=own.jinja", "there is no such file"),
        ("--template-arguments=on", "give a JSON object"),
    ):
        with pytest.raises(ValueError, match=said):
            bench(options([*common, "--prompts", str(text), option]))
    with pytest.raises(ValueError, match="lines need `messages` or `prompt`"):
        bench(options([*common, "--prompts", str(text), "--suffix-log", str(text)]))
    with pytest.raises(ValueError, match="there are prompt-lookup"):
        bench(options([*common, "--prompts", str(text), "--baselines", "luck"]))


def test_bench_leaves_a_target_that_no_device_holds_to_the_engine(
    run: PreparedRun, target: Path, text: Path, monkeypatch: pytest.MonkeyPatch
):
    sysconf = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: 1 if name == "SC_PHYS_PAGES" else sysconf(name))
    common = ["--target", str(target), "--draft", str(run.folder.export), "--prompts", str(text)]
    for engines in ("reference", "reference,sglang"):
        with pytest.raises(ValueError, match=rf"--engines {engines}: the target's weights take .*: give sglang"):
            bench(options([*common, "--engines", engines]))
    # Without the tests' kernels SGLang has none for a CPU.
    with pytest.raises(ValueError, match=r"^draft in SGLang: not served: SGLang has no kernels"):
        bench(options(common))


def test_drafts_that_read_other_layers_share_one_target(run: PreparedRun, target: Path, tmp_path: Path):
    """A draft decodes the same whether its layers are all that the target captures, or some of them."""
    other = export(target, tmp_path / "other", (1, 2), seed=2)
    alone = load_contestants(target, [other], torch.float32)
    together = load_contestants(target, [run.folder.export, other], torch.float32)
    assert isinstance(together.champion, SelectedLayers)
    assert together.target.aux_layer_ids == (0, 1, 2)
    assert together.eos_ids == {1}
    prompt, own = [5, 9, 30, 2, 44], [7, 20, 3, 60, 31]
    aux = features(together.target, [*prompt, *own])
    mine = features(alone.target, [*prompt, *own])
    assert torch.equal(together.champion.select(aux), mine)
    walks = [
        simulate(source, prompt, own, read, 4, eos_ids=together.eos_ids)
        for source, read in ((together.champion, aux), (alone.draft, mine))
    ]
    assert walks[0] == walks[1]
    first = speculate(together.target, together.champion, prompt, 3, 12, frozenset())
    assert first == speculate(alone.target, alone.draft, prompt, 3, 12, frozenset())
    drawn = [
        speculate(one.target, source, prompt, 3, 12, frozenset(), sampling=Sampling(1.0, 0.9, generator))
        for one, source in ((together, together.champion), (alone, alone.draft))
        for generator in [torch.Generator().manual_seed(1)]
    ]
    assert drawn[0] == drawn[1]


def test_the_exact_target_goes_where_there_is_room(run: PreparedRun, target: Path, monkeypatch: pytest.MonkeyPatch):
    wanted: list[int] = []
    monkeypatch.setattr(contestants, "device_with", lambda nbytes: wanted.append(nbytes) or torch.device("meta"))
    rough = load_contestants(target, [run.folder.export], torch.bfloat16)
    assert rough.exact().device == torch.device("meta")
    assert rough.exact().head_weight.dtype == torch.float32
    assert wanted == [int((target / "model.safetensors").stat().st_size / 0.9)]
    single = load_contestants(target, [run.folder.export], torch.float32)
    assert single.exact() is single.target
    assert len(wanted) == 1


def test_an_exact_target_beyond_this_machines_memory_stays_on_disk(
    run: PreparedRun, target: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    whole = load_contestants(target, [run.folder.export], torch.bfloat16).exact()
    monkeypatch.setattr(contestants, "memory", lambda: (target / "model.safetensors").stat().st_size)
    exact = load_contestants(target, [run.folder.export], torch.bfloat16).exact()
    assert {weight.device.type for weight in exact.model.parameters()} == {"meta"}
    tokens = torch.tensor([[5, 9, 30, 2, 44]])
    ours, theirs = (one.logits(one.forward(tokens).last[0]) for one in (exact, whole))
    assert torch.equal(ours, theirs)
    assert "read from disk at each divergence" in capfd.readouterr().out


def test_drafts_of_one_build_are_timed_once(run: PreparedRun, target: Path, tmp_path: Path):
    """So that noise of timings does not decide between a draft and its successor."""
    twin, other = export(target, tmp_path / "twin", (0, 2), seed=2), export(target, tmp_path / "other", (1,), seed=3)
    first, again = (load_contestants(target, [run.folder.export, each], torch.float32) for each in (twin, other))
    config = run.config.benchmark.model_copy(update={"loads": (2,), "prompt_tokens": 8, "tree_topk": (3,)})
    assert same_build(first.draft, first.champion)
    assert not same_build(again.draft, again.champion)
    _, (ours, twins) = time_steps(first.target, [first.draft, first.champion], config)
    assert ours == twins
    assert {(each.batch, each.tokens) for each in ours} == {(batch, at) for batch in (1, 2, 6) for at in (1, 3, 7)}


def test_a_draft_that_sglang_has_no_model_for_is_not_served_and_says_so(
    run: PreparedRun, target: Path, monkeypatch: pytest.MonkeyPatch
):
    arguments = speculative_arguments(run.folder.export, 3)
    assert arguments[:2] == ["--speculative-draft-model-path", str(run.folder.export)]
    assert arguments[arguments.index("--speculative-num-steps") + 1] == "3"
    export(target, run.folder.export, (1,), seed=2)
    monkeypatch.setenv("SGLANG_PLATFORM", "one that could serve")
    result = serve(run)
    assert "SGLang has no model for EAGLE-3 drafts that are configured like this one" in result.note
    assert result.acceptance is None
    engine = run.config.generator.model_copy(update={"engine": "sglang"})
    served = replace(run, config=run.config.model_copy(update={"generator": engine}))
    assert served_answers(served, run.folder.export, [[1, 2]]) is None


def test_a_served_text_that_is_not_the_targets_is_compared_with_a_walk_over_itself(run: PreparedRun, target: Path):
    """As in bfloat16, where an engine decides ties otherwise: two texts have two acceptance lengths by chance."""
    config = run.config.benchmark
    contestants = load_contestants(target, [run.folder.export], torch.float32)
    certain = ProposesCertainly(contestants.draft)
    prompts = heldout_prompts(run.open_samples("heldout"), config)
    sampling = Sampling(1.0, generator=torch.Generator().manual_seed(3))
    decoded = speculate_together(
        contestants.target, certain, prompts, config.lookahead, config.max_new_tokens, contestants.eos_ids,
        sampling=sampling,
    )  # fmt: skip
    texts = tuple(tuple(one.tokens) for one in decoded)
    walked = walk_decoded(contestants, contestants.draft, prompts, texts, config.lookahead)
    assert [counts[-1] for counts in walked] == [one.counts for one in decoded]
    served = summarise([(one.counts,) for one in decoded])
    note = ServedResult(lookahead=config.lookahead, acceptance=served, texts=texts, note="elsewhere")
    write_atomically(run.folder.served, note)
    result = benchmark_run(run, None, "champion")
    assert result.acceptance.length[config.lookahead] != served.length[config.lookahead]
    assert GateEvidence.read(run.folder.gate).served_gap == 0
    assert result.served is not None
    assert result.served.acceptance == served
    assert result.served.texts == ()
    counts = RequestCounts.read(run.folder.request_counts)
    assert len(counts.texts) == run.config.promotion.smoke_prompts
    smoke = smoke_test(run, run.folder.export, counts)
    assert smoke.passed, smoke.reason
    without = smoke_test(run, run.folder.export, counts.model_copy(update={"texts": ()}))
    assert without == smoke, "in float32 the target writes the same text again"
    # A version that waits for approval is tested long after its benchmark, when its text may be gone.
    assert smoke_test(RunWithTarget(run.folder, run.config, run.target), run.folder.export, counts) == smoke
    worse = {config.lookahead: tuple((tokens, 2 * steps) for tokens, steps in counts.greedy[config.lookahead])}
    assert not smoke_test(run, run.folder.export, counts.model_copy(update={"greedy": worse})).passed


def test_sglang_has_its_gpus_to_itself(run: PreparedRun, target: Path, text: Path, monkeypatch: pytest.MonkeyPatch):
    """It refuses GPUs that another process occupies: its servers end before the reference decoder loads anything."""
    order: list[str] = []

    class LoadedError(Exception):
        pass

    def load(*_args: object, **_options: object) -> Contestants:
        order.append("load")
        raise LoadedError

    for module in (smoke, standalone):
        monkeypatch.setattr(module, "load_contestants", load)
    monkeypatch.setattr(smoke, "served_answers", lambda *_args: order.append("serve"))
    monkeypatch.setattr(standalone, "serve", lambda *_args: order.append("serve") or [])
    monkeypatch.setenv("SGLANG_PLATFORM", "one that could serve")
    conditions = benchmark_conditions.conditions(
        run.config.benchmark, benchmark_conditions.Counter.sglang("float32", 1, None), target=run.target,
        draft=run.folder.export, dataset_hash="d", template_hash="t", prompts=12,
    )  # fmt: skip
    with pytest.raises(LoadedError):
        smoke_test(run, run.folder.export, RequestCounts(conditions=conditions, greedy={}, sampled={}, prompts=((3,),)))
    arguments = ["--target", str(target), "--draft", str(run.folder.export), "--prompts", str(text)]
    with pytest.raises(LoadedError):
        bench(options([*arguments, "--engines", "reference,sglang"]))
    assert order == ["serve", "load"] * 2


def dflash(target: Path, folder: Path) -> Path:
    """An untrained draft of a block of 16, exported."""
    config = DFlashConfig(
        num_heads=2, num_kv_heads=1, head_dim=16, intermediate_size=32, layer_types=("full_attention",), mask_token_id=5
    )
    torch.manual_seed(3)
    every = DraftVocabulary(torch.arange(VOCABULARY_SIZE), VOCABULARY_SIZE)
    return export_draft(build_draft(config, torch.zeros(VOCABULARY_SIZE, 32), every, (0, 2)), target, folder)


def test_a_champion_of_longer_blocks_than_the_recipe_looks_ahead_is_compared_as_it_is_served(
    run: PreparedRun, target: Path, tmp_path: Path
) -> None:
    champion = dflash(target, tmp_path / "champion")
    assert served_at(champion, run.config.benchmark.lookahead) == 15 > run.config.benchmark.max_lookahead
    result = benchmark_run(run, champion, "version 7")
    assert result.goodput is not None
    assert result.goodput.champion is not None
    assert {best.lookahead for best in result.goodput.champion.rows} <= {0, 15}
    assert result.champion is not None
    assert max(result.champion.length) == 15
    assert max(result.acceptance.length) == run.config.benchmark.max_lookahead


@pytest.mark.parametrize("proposals", ["greedy", "drawn"])
def test_the_drift_test_s_reference_is_of_proposals_as_they_are_served(run: PreparedRun, proposals: str) -> None:
    settings = run.config.benchmark.model_copy(update={"sampled_proposals": proposals, "max_new_tokens": 48})
    config = run.config.model_copy(update={"benchmark": settings})
    result = benchmark_run(replace(run, config=config), None, "champion")
    at, counts = settings.lookahead, RequestCounts.read(run.folder.request_counts)
    own, drawn = result.sampled, result.sampled_drawn
    assert own is not None
    assert drawn is not None
    steps = sum(row[1] for row in counts.sampled[at])
    cut = counts.conditions.prompts
    expected = {"greedy": own.steps[at], "drawn": drawn.steps[at]}
    assert expected[proposals] - 0.5 <= steps <= expected[proposals] + cut + 0.5
    assert (steps % 1 > 0) == (proposals == "drawn"), "steps are expected where proposals are drawn"


def test_bench_compares_a_text_that_is_not_the_targets_with_a_walk_over_itself(run: PreparedRun, target: Path):
    config = run.config.benchmark
    contestants = load_contestants(target, [run.folder.export], torch.float32)
    prompts = heldout_prompts(run.open_samples("heldout"), config)[:4]
    sources = {"draft": contestants.draft, "lookup": PromptLookup()}
    decoding = {"draft": ProposesCertainly(contestants.draft), "lookup": PromptLookup()}
    plan = HarnessPlan(
        suites={"asked": SuitePrompts(prompts, (), "0", "none")}, shapes=("3",), temperatures=(0.0,),
        batches=(), repeats=1, timed_prompts=1, verified_prompts=len(prompts), max_new_tokens=12, seed=0,
    )  # fmt: skip
    harness = Harness(contestants, sources, plan, config, {})
    for name, source in decoding.items():
        place = Place("asked", 0.0, name, "3")
        own, other = (
            speculate_together(contestants.target, source, prompts, 3, 12, contestants.eos_ids, sampling=sampling)
            for sampling in (GREEDY, Sampling(1.0, generator=torch.Generator().manual_seed(3)))
        )
        assert [one.tokens for one in own] != [one.tokens for one in other]
        assert harness._same_counts(place, other, own, 3) == len(prompts)
        wrong = [replace(one, counts=AcceptedCounts(3, (3,) * 40)) for one in other]
        assert harness._same_counts(place, wrong, own, 3) == 0


def test_a_table_of_the_terminal_breaks_no_word() -> None:
    row = {
        "texts at once": "16", "best lookahead": "0", "tokens/s": "2,588", "target alone": "2,588", "gain": "+0.0%",
        "prompt lookup": "2,588", "best tree": "2 deep, top-k 2, 3 tokens", "its tokens/s": "1,504",
    }  # fmt: skip
    console = Console(width=80)
    with console.capture() as shown:
        console.print(terminal_table("Predicted goodput", [row]))
    words = shown.get().split()
    assert set(words) >= {word for name in row for word in name.split()} | {"+0.0%", "1,504", "top-k"}
