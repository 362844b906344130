"""The report's files, and the same in Prefect and in MLflow."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.testing.utilities import prefect_test_harness

from infra.ledger.answers import Quarantined
from infra.markdown import escaped, markdown_table
from infra.quantities import duration, signed
from infra.records.acceptance import (
    Acceptance,
    BenchmarkResult,
    CategoryDecision,
    GateDecision,
    RegisteredDraft,
    ServedResult,
)
from infra.records.benchmark_text import acceptance_tables, findings, goodput_rows, summary
from infra.records.data_path import SampleProgress, SampleSlot, SamplesRecord, TargetRecord, TrainingResult
from infra.records.drafts import ExportRecord
from infra.records.goodput import ConfidenceFit, TreeGoodput
from infra.tracking.client import NOTE, connect
from infra.tracking.runs import TrackedRun
from tasks.registry import open_tracking, register_draft
from tasks.report.meaning import compared, how_good, what_next
from tasks.report.write import benchmark_report, tracking_link, training_report, write_report
from tasks.run import OpenRun


def test_the_report_holds_what_was_promised(result: BenchmarkResult, trained: TrainingResult) -> None:
    shown = training_report(trained, SampleProgress(consumed=30, pending=9, quarantined=1, attempts=3))
    assert shown["samples"] == {"total": 40, "consumed": 30, "quarantined": 1, "capture_failures": 3}
    assert shown["tokens"] == 1000
    expected = {"steps": 20, "wall_s": 10.0, "data_wait_share": 0.05, "tokens_per_s": 100.0, "slow_side": "training"}
    assert expected.items() <= shown["train"].items()
    report = benchmark_report(result)
    assert report["acceptance"]["draft"] == {"length": {"1": 1.5, "4": 3.5}, "by_position": [0.9, 0.5, None]}
    assert report["acceptance"]["reference"]["length"] == {"4": 3.5}
    assert report["baseline"]["prompt_lookup"] == 2.1
    assert report["target"]["distinct_token_share"] == 0.4
    assert report["lossless"] == {"tokens": 1000, "mismatches": 0, "ties": 1}
    assert report["speed"]["plain_tokens_per_s"] == 50.0
    assert report["speed"]["speculative_tokens_per_s"] is None
    assert report["conditions"]["lookahead"] == 4


@pytest.mark.slow
def test_prefect_and_mlflow_show_the_run(
    *,
    run: OpenRun,
    tracking: TrackedRun,
    target: TargetRecord,
    samples: SamplesRecord,
    trained: TrainingResult,
    export: ExportRecord,
    result: BenchmarkResult,
) -> None:
    draft = register_draft.fn(run, tracking, target, trained, export, result)
    lose_a_sample(run, "out of | memory")
    run.folder.stitched.mkdir()

    @flow
    def reporting() -> None:
        open_tracking(run)
        write_report(run, target, samples, trained, result, draft)

    with prefect_test_harness(server_startup_timeout=120):
        reporting()
        with get_client(sync_client=True) as client:
            (named,) = client.read_flow_runs()
            artifacts = {str(found.key): found for found in client.read_artifacts()}
    assert named.name == run.folder.name
    assert set(artifacts) == {"report-tiny"}
    page = str(artifacts["report-tiny"].data)
    assert "data:image/png;base64," in page
    assert "3.50" in page
    assert "out of \\| memory" in page
    assert 'href="stitched"' in run.folder.report_page.read_text()
    assert artifacts["report-tiny"].description == (
        "3.50 tokens per step, gate passed against no draft (+250.0%), prompt lookup 2.10"
    )

    logged = connect(tracking.uri).get_run(tracking.run_id)
    assert "Better than every rival" in logged.data.tags[NOTE]
    assert "data:image" not in logged.data.tags[NOTE]
    assert logged.data.tags["gate"] == "passed"
    names = {artifact.path for artifact in connect(tracking.uri).list_artifacts(tracking.run_id)}
    assert {"report.html", "report.json", "benchmark"} <= names
    assert "out of | memory" in run.folder.report_page.read_text()
    assert json.loads(run.folder.report.read_text())["samples"]["quarantined"] == 1


def lose_a_sample(run: OpenRun, error: str) -> None:
    with run.open_ledger() as ledger:
        ledger.create_run(budget_bytes=1000, bytes_per_token=1, lease_seconds=60, max_attempts=1, order="any")
        ledger.open_epoch(None, 0, [SampleSlot(ordinal=0, sample=7, tokens=10)])
        (lease,) = ledger.lease("generator-0", 1)
        ledger.fail(lease, error)
        assert ledger.quarantined() == [Quarantined(0, 0, 7, error)]


def test_the_table_has_a_row_per_source(result: BenchmarkResult) -> None:
    tables = acceptance_tables(result)
    assert list(tables) == ["Greedy text", "Text sampled at temperature 1"]
    greedy, sampled = tables.values()
    first = "acceptance length by lookahead"
    assert greedy[0] == {first: "draft, simulated", "1": "1.50", "4": "3.50", "steps": "50"}
    assert greedy[1] == {first: "draft, real decoding (4 texts)", "1": "", "4": "3.50", "steps": "9"}
    baselines = ["prompt lookup", "Token Recycling", "suffix decoding"]
    assert [row[first] for row in greedy[2:]] == baselines
    assert [row[first] for row in sampled] == ["draft, greedy proposals", *baselines]


def test_what_the_gate_judged_leads(result: BenchmarkResult) -> None:
    drawn, suffix = (result.acceptance.model_copy(update={"length": {1: 1.5, 4: length}}) for length in (3.0, 3.1))
    under = result.conditions.model_copy(update={"proposals": "drawn"})
    changes = {"sampled_drawn": drawn, "traffic": "sampled"}
    measured = result.model_copy(update=changes | {"conditions": under})
    assert (measured.length, measured.unbeaten) == (3.0, [])
    tables = acceptance_tables(measured)
    assert list(tables) == ["Text sampled at temperature 1", "Greedy text"]
    assert [row["acceptance length by lookahead"] for row in tables["Text sampled at temperature 1"]][:2] == [
        "draft, drawn proposals", "draft, greedy proposals",
    ]  # fmt: skip
    assert measured.model_copy(update={"conditions": result.conditions}).length == 2.5
    worse = measured.model_copy(update={"more_baselines_sampled": {"suffix decoding": suffix}})
    assert worse.unbeaten == ["suffix decoding"]
    assert "but does not beat suffix decoding (3.10) on text sampled at temperature 1: 3.00 tokens" in summary(worse)
    assert "on greedy text 3.50 against 2.10, 1.90 and 1.80" in summary(worse)


def test_goodput_has_a_row_per_load(result: BenchmarkResult) -> None:
    one, many = goodput_rows(result)
    assert one == {
        "texts at once": "1", "best lookahead": "3", "tokens/s": "250", "target alone": "100", "gain": "+150.0%"
    }  # fmt: skip
    assert (many["best lookahead"], many["gain"]) == ("0", "+0.0%")
    assert "with 1 text at once propose 3 tokens (2.50 times the target alone)" in findings(result)["Goodput"]
    served = ServedResult(lookahead=4, acceptance=result.reference, note="")
    assert "own figures are of lookahead 4" in findings(result.model_copy(update={"served": served}))["Goodput"]
    found = result.goodput
    assert found is not None
    fit = ConfidenceFit(temperatures=(1.0,), steps=900, errors_before=(0.5,), errors_after=(0.3,))
    wrong = result.model_copy(update={"goodput": found.model_copy(update={"confidence": fit})})
    assert "wrong by 30.0% at the worst position" in findings(wrong)["Confidences"]
    assert "is not offered" in findings(wrong)["Confidences"]
    lookup = result.model_copy(update={"goodput": found.model_copy(update={"prompt_lookup": found.draft})})
    assert [row["prompt lookup"] for row in goodput_rows(lookup)] == ["250", "800"]
    rows = tuple(row.model_copy(update={"tokens_per_s": 1.1 * row.tokens_per_s}) for row in found.draft.rows)
    champion = found.model_copy(update={"champion": found.draft.model_copy(update={"rows": rows})})
    told = goodput_rows(result.model_copy(update={"goodput": champion}))
    assert [(row["champion"], row["its lookahead"]) for row in told] == [("275", "3"), ("880", "0")]
    assert goodput_rows(result.model_copy(update={"goodput": None})) == []
    tree = TreeGoodput(
        batch=1, depth=4, topk=2, tokens=7, tokens_per_step=3.0, step_s=0.01, tokens_per_s=300.0, without=250.0
    )
    branched = result.goodput.model_copy(update={"trees": (tree,)})
    first, second = goodput_rows(result.model_copy(update={"goodput": branched}))
    assert (first["best tree"], first["its tokens/s"]) == ("4 deep, top-k 2, 7 tokens", "300")
    assert (second["best tree"], second["its tokens/s"]) == ("", "")


@pytest.mark.parametrize(
    ("uri", "text", "href"),
    [
        ("https://mlflow.example/", "https://mlflow.example/#/experiments/3/runs/r", True),
        ("https://me:secret@mlflow.example", "https://me:***@mlflow.example/#/experiments/3/runs/r", True),
        (
            "sqlite:////my runs/mlflow.db",
            "mlflow ui --backend-store-uri 'sqlite:////my runs/mlflow.db'  # run r",
            False,
        ),
        ("postgresql://me:secret@db/mlflow", "mlflow ui --backend-store-uri 'postgresql://me:***@db/mlflow'", False),
    ],
)
def test_a_server_is_linked_and_a_database_gets_a_command(uri: str, text: str, href: bool) -> None:
    link = tracking_link(TrackedRun(uri=uri, experiment_id="3", run_id="r"))
    assert link.text.startswith(text)
    assert link.href == (link.text if href else None)


@pytest.mark.parametrize(
    ("greedy", "sampled", "shares", "told", "repeats"),
    [
        (
            (3.65, 2.16, 2.4),
            (2.0, 1.2, 1.3),
            (0.6, 0.7),
            "beats prompt lookup (2.16) and Token Recycling (2.40)",
            False,
        ),
        ((2.3, 2.16, 2.4), (2.0, 1.2, 1.3), (0.6, 0.7), "beats prompt lookup (2.16), but does not beat Token R", False),
        ((1.61, 1.83, 1.7), (1.45, 1.1, 1.2), (0.31, 0.7), "does not beat prompt lookup (1.83) or Token R", True),
        ((1.61, 1.83, 1.5), (1.45, 1.9, 1.2), (0.7, 0.6), "but does not beat prompt lookup (1.83)", False),
    ],
)
def test_the_summary_excuses_only_a_text_that_repeats_itself(
    result: BenchmarkResult,
    greedy: tuple[float, ...],
    sampled: tuple[float, ...],
    shares: tuple[float, float],
    told: str,
    repeats: bool,
) -> None:
    names = (
        "acceptance",
        "prompt_lookup",
        "more_baselines",
        "sampled",
        "prompt_lookup_sampled",
        "more_baselines_sampled",
    )
    measured = {}
    for name, length in zip(names, (*greedy, *sampled), strict=True):
        of = result.acceptance.model_copy(update={"length": {4: length}})
        measured[name] = {"Token Recycling": of} if name.startswith("more") else of
    distinct = {"target_distinct_token_share": shares[0], "sampled_distinct_token_share": shares[1]}
    text = summary(result.model_copy(update=measured | distinct))
    assert told in text
    assert f"{greedy[0]:.2f} tokens per verification step at lookahead 4" in text
    assert f"{sampled[0]:.2f} against {sampled[1]:.2f} and {sampled[2]:.2f}" in text
    assert ("repeats itself: distinct-token share 0.31, 0.70 when sampled" in text) == repeats


def test_a_champion_in_service_is_compared_with(result: BenchmarkResult) -> None:
    champion = Acceptance(conversations=8, length={1: 1.4, 4: 2.8}, steps={4: 60}, by_position=(0.8,))
    gate = result.gate.model_copy(update={"against": "version 6", "lower_bound": 0.19})
    words = compared(result.model_copy(update={"champion": champion, "gate": gate}))
    assert (
        "against the draft in service, which reaches 2.80, the difference is +25.0% (the gate: at least +19.0% with"
        in words
    )
    assert "no draft in service" in compared(result)


def test_a_report_says_that_the_draft_saw_text_only(target: TargetRecord, result: BenchmarkResult) -> None:
    multimodal = target.model_copy(update={"text_only": True})
    assert "it saw text only, and its proposals after an image may be worse." in how_good(multimodal, result)
    assert "image" not in how_good(target, result)


def test_a_speed_is_told_as_it_was(target: TargetRecord, result: BenchmarkResult) -> None:
    assert "no speed-up is published" in how_good(target, result)
    for speedup, faster, words in ((1.5, 75.0, "1.50 times as fast"), (0.8, 40.0, "became slower")):
        speed = result.speed.model_copy(update={"speedup": speedup, "speculative_tokens_per_s": faster})
        told = how_good(target, result.model_copy(update={"speed": speed}))
        assert words in told
        assert f"{faster:g} instead of 50 tokens per second" in told


@pytest.mark.parametrize(
    ("passed", "aliases", "tags", "expected"),
    [
        (True, ("champion",), {"replaces": "2"}, "`draftsmith drafts rollback --name d` puts version 2 back"),
        (True, ("champion",), {}, "is the champion, the draft that serving takes from now on."),
        (True, (), {}, "somebody has moved the aliases since"),
        (True, ("challenger",), {}, "waits for approval"),
        (True, ("challenger",), {"refused": "compared with no draft"}, "is not promoted: compared with no draft."),
        (True, ("champion",), {"refused": "not today", "replaces": "2"}, "puts version 2 back"),
        (True, (), {"smoke_test": "failed: 3 mismatches"}, "did not decode as it was benchmarked (3 mismatches)."),
        (False, ("challenger",), {}, "waits as the challenger"),
        (False, ("champion",), {}, "only because somebody promoted it"),
        (False, (), {}, "is registered and does not serve"),
    ],
)
def test_what_comes_next_is_what_the_registry_says(
    gate: GateDecision, passed: bool, aliases: tuple[str, ...], tags: dict[str, str], expected: str
) -> None:
    draft = RegisteredDraft(name="d", version=3, model_id="m", aliases=aliases, tags=tags)
    assert expected in what_next(gate.model_copy(update={"passed": passed}), draft)


def test_a_version_that_is_ahead_is_said_to_be_gone_on_from(gate: GateDecision) -> None:
    draft = RegisteredDraft(name="d", version=3, model_id="m", aliases=("challenger",), tags={})
    for unproven in (True, False):
        said = what_next(gate.model_copy(update={"passed": False, "unproven": unproven}), draft)
        assert ("start_from=furthest goes on from it" in said) == unproven


def test_the_gate_says_what_each_category_could_show(result: BenchmarkResult) -> None:
    code = CategoryDecision(
        ground="gsm8k", category="code", prompts=30, challenger=2.0, champion=2.5, difference=-0.2, p=0.01,
        smallest_detectable=0.125, blocks=True,
    )  # fmt: skip
    few = code.model_copy(update={"category": "few", "p": None, "smallest_detectable": None, "blocks": False})
    assert "by category" not in findings(result)["Gate"]
    gate = result.gate.model_copy(update={"categories": (code, few)})
    line = findings(result.model_copy(update={"gate": gate}))["Gate"]
    assert "code of gsm8k −20.0% on 30 prompts (p = 0.01 by Holm, a worsening by 12.5% would show, BLOCKS)" in line
    assert "few of gsm8k −20.0% on 30 prompts (too few prompts to judge)" in line


def test_a_gate_not_passed_says_how_many_prompts_would_have_shown_the_difference(result: BenchmarkResult) -> None:
    gate = result.gate.model_copy(update={"passed": False, "prompts_needed": 424})
    said = findings(result.model_copy(update={"gate": gate}))["Gate"]
    assert said.endswith("a difference of 10.0% in four of five cases, and would show this one if they were 424")
    assert "this one" not in findings(result)["Gate"]
    # Where all prompts agree, the jackknife finds no error, of two prompts as of a thousand.
    gate = gate.model_copy(update={"smallest_detectable": math.expm1(math.log1p(gate.margin)), "prompts_needed": None})
    said = findings(result.model_copy(update={"gate": gate}))["Gate"]
    assert said.endswith("all prompts gave the same ratio, so they do not tell how much others would differ")


@pytest.fixture
def gate(result: BenchmarkResult) -> GateDecision:
    return result.gate


@given(st.lists(st.text(), min_size=1, max_size=4))
def test_a_table_keeps_its_shape_whatever_is_in_it(cells: list[str]) -> None:
    lines = markdown_table([{str(at): cell for at, cell in enumerate(cells)}]).split("\n")
    assert len(lines) == 3
    bars = [line.replace("\\\\", "").replace("\\|", "").count("|") for line in lines]
    assert bars == [len(cells) + 1] * 3


@given(st.text())
def test_escaped_text_loses_only_its_line_breaks(text: str) -> None:
    plain = escaped(text)
    assert "".join(part.replace("\\", "") for part in plain.split("\\\\")) == " ".join(text.split()).replace("\\", "")


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.94, "0.9 s"), (59.7, "1 min 0 s"), (311, "5 min 11 s"), (3599.6, "1 h 0 min"), (90061, "25 h 1 min")],
)
def test_durations_have_two_units_at_most(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_differences_carry_their_sign() -> None:
    assert [signed(value) for value in (0.604, 0.0, -0.1)] == ["+60.4%", "+0.0%", "−10.0%"]


def test_the_template_is_shipped() -> None:
    root = Path(__file__).parents[3]
    assert list((root / "tasks" / "report").glob("*.jinja"))
    assert '"report/*.jinja"' in (root / "pyproject.toml").read_text()
