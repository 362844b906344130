"""Writes the run's report: `report.json`, `report.html`, and the pages of Prefect and MLflow."""

import json
import shlex
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.runtime import flow_run
from prefect.utilities.urls import url_for

from infra.data_plane.bottleneck import in_words, slow_side
from infra.files.atomic import write_atomically
from infra.planner.measured import read_plan
from infra.provenance import git_sha
from infra.records.acceptance import Acceptance, BenchmarkResult, RegisteredDraft
from infra.records.data_path import SampleProgress, SamplesRecord, TargetRecord, TrainingResult, generators_changes
from infra.redaction import redacted
from infra.settings import prefect_is_private
from infra.tracking.runs import TrackedRun, describe_run
from tasks.report.facts import Link, RunFacts, acceptance_by_lookahead
from tasks.report.markdown import artifact_key, run_note, run_page, version_line
from tasks.report.page import render
from tasks.run import OpenRun
from tasks.side_effects import side_effect


@side_effect("write report", retries=1)
def write_report(
    run: OpenRun,
    target: TargetRecord,
    samples: SamplesRecord,
    trained: TrainingResult,
    result: BenchmarkResult,
    draft: RegisteredDraft,
) -> None:
    """Write `report.json` and `report.html`, and show the same in Prefect, in MLflow and in the log."""
    with run.open_ledger() as ledger:
        progress, quarantined = ledger.progress(), ledger.quarantined()
    facts = RunFacts(
        run=run.folder.name, config=run.config, target=target, samples=samples,
        trained=trained, result=result, draft=draft, progress=progress, quarantined=quarantined,
        written=datetime.now().astimezone(), links=tuple(links(run)), git_sha=git_sha(),
        generators=generators_changes(run.folder.generators), plan=read_plan(run.folder.plan),
    )  # fmt: skip
    write_files(run, facts)
    tracking = TrackedRun.read(run.tracking_record)
    tags = {"gate": "passed" if result.gate.passed else "not passed", "version": f"{draft.name} {draft.version}"}
    describe_run(tracking, run_note(facts), tags, [run.folder.report, run.folder.report_page])
    table: list[dict[str, Any]] = [{**row} for row in acceptance_by_lookahead(result)]
    create_table_artifact(
        table, key=artifact_key("acceptance-length", run.config.name), description="Acceptance length by lookahead"
    )
    page = run_page(facts, run.folder.plots)
    create_markdown_artifact(page, key=artifact_key("report", run.config.name), description=version_line(result))
    get_run_logger().info("%s\nreport: %s", result.summary, run.folder.report_page)


def write_files(run: OpenRun, facts: RunFacts) -> None:
    """Write `report.json` and `report.html`."""
    draft = facts.draft
    report = {
        "run": facts.run,
        "data": facts.samples.model_dump(exclude={"path"}),
        **training_report(facts.trained, facts.progress),
        "generators": [change.model_dump() for change in facts.generators],
        "plan": dict(facts.planned),
        **benchmark_report(facts.result),
        "draft": {"name": draft.name, "version": draft.version, "alias": _alias(draft), "model_id": draft.model_id},
    }
    report["target"] |= facts.target.model_dump(include={"name", "revision", "licence"})
    write_atomically(run.folder.report, json.dumps(report, indent=2) + "\n")
    write_atomically(run.folder.report_page, render(facts, run.folder.plots))


def links(run: OpenRun) -> Iterator[Link]:
    """Links to pages with more about the run."""
    yield tracking_link(TrackedRun.read(run.tracking_record))
    prefect = flow_run_url()
    if prefect and not prefect_is_private():
        yield Link("Prefect flow run", prefect, prefect)
    else:
        yield Link("Prefect flow run", f"draftsmith ui  # flow run {run.folder.name}")
    yield Link("Run folder", str(run.folder.path))
    for name, path in (
        ("Exported draft", run.folder.export),
        ("Logs", run.folder.logs),
        ("The same as data", run.folder.report),
    ):
        yield Link(name, path.name, path.name)


def tracking_link(tracking: TrackedRun) -> Link:
    """The run's page in MLflow, or how to open it where no server is behind the address."""
    uri = redacted(tracking.uri)
    if uri.startswith(("http://", "https://")):
        page = f"{uri.rstrip('/')}/#/experiments/{tracking.experiment_id}/runs/{tracking.run_id}"
        return Link("MLflow run", page, page)
    return Link("MLflow run", f"mlflow ui --backend-store-uri {shlex.quote(uri)}  # run {tracking.run_id}")


def flow_run_url() -> str | None:
    """The flow run's page, where the flow runs with a Prefect server that has one."""
    return url_for("flow-run", obj_id=flow_run.id) if flow_run.id else None


def _alias(draft: RegisteredDraft) -> str | None:
    return ", ".join(draft.aliases) or None


def training_report(trained: TrainingResult, progress: SampleProgress) -> dict[str, Any]:
    """What was trained: samples, tokens, time."""
    return {
        "samples": {
            "total": progress.total,
            "consumed": progress.consumed,
            "quarantined": progress.quarantined,
            "capture_failures": progress.attempts,
        },
        "tokens": trained.tokens,
        "train": {
            "steps": trained.steps,
            "wall_s": trained.wall_s,
            "data_wait_share": trained.data_wait_s / trained.step_s if trained.step_s else 0.0,
            "tokens_per_s": trained.tokens / trained.step_s if trained.step_s else 0.0,
            "checkpoint_stall_s": trained.checkpoint_stall_s,
            **({"peak_gpu_bytes": trained.peak_gpu_bytes} if trained.peak_gpu_bytes else {}),
            "final_loss": trained.final_loss,
            "acceptance_by_position": trained.acceptance_by_position,
            "vocabulary_coverage": trained.vocabulary_coverage,
            "token_coverage": trained.token_coverage,
            "slow_side": slow_side(trained.rates),
            "bottleneck": in_words(trained.rates),
        },
    }


def benchmark_report(result: BenchmarkResult) -> dict[str, Any]:
    """The benchmark in a page: acceptance and its baselines, lossless decoding, speed, the gate, the conditions."""
    lookahead = result.conditions.lookahead
    return {
        "target": {
            "distinct_token_share": result.target_distinct_token_share,
            "sampled_distinct_token_share": result.sampled_distinct_token_share,
        },
        "acceptance": {
            "simulated": _lengths(result.simulated),
            "reference": _lengths(result.reference),
            "sampled": _lengths(result.sampled),
            "sampled_reference": result.sampled_reference and _lengths(result.sampled_reference),
            "served": result.served and result.served.model_dump(mode="json"),
            "gap": result.gap,
            "counts_identical": result.counts_identical,
        },
        "baseline": {
            "prompt_lookup": result.prompt_lookup.length[lookahead],
            "prompt_lookup_length": dict(result.prompt_lookup.length),
            "prompt_lookup_sampled": result.prompt_lookup_sampled.length[lookahead],
            "beats_prompt_lookup": result.beats_prompt_lookup,
            "token_recycling": result.token_recycling and result.token_recycling.length[lookahead],
            "token_recycling_sampled": result.token_recycling_sampled
            and result.token_recycling_sampled.length[lookahead],
            "beats_token_recycling": result.beats_token_recycling,
        },
        "vocabulary_mass": result.vocabulary_mass,
        "lossless": result.lossless.model_dump(mode="json", include={"tokens", "mismatches", "ties"}),
        "speed": result.speed.model_dump(mode="json"),
        "goodput": result.goodput and [load.model_dump(mode="json") for load in result.goodput.by_load],
        "gate": result.gate.model_dump(mode="json"),
        "conditions": result.conditions.model_dump(mode="json"),
        "summary": result.summary,
    }


def _lengths(acceptance: Acceptance) -> dict[str, Any]:
    return {"length": dict(acceptance.length), "by_position": list(acceptance.by_position)}
