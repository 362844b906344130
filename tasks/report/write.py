"""Writes the run's report: `report.json`, `report.html`, and the pages of Prefect and MLflow."""

import json
import shlex
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from prefect import get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.runtime import flow_run
from prefect.utilities.urls import url_for

from infra.data_plane.bottleneck import in_words, slow_side
from infra.files.atomic import write_atomically
from infra.planner.plan import read_plan
from infra.provenance import git_sha
from infra.records.acceptance import BenchmarkResult, RegisteredDraft
from infra.records.benchmark_text import key
from infra.records.data_path import SampleProgress, SamplesRecord, TargetRecord, TrainingResult, generators_changes
from infra.records.drafts import ExportRecord
from infra.redaction import redacted
from infra.run.device_time import device_time
from infra.settings import prefect_is_private
from infra.tracking.runs import TrackedRun, describe_run
from tasks.report.page import Link, RunFacts, run_html, run_markdown, version_line
from tasks.run import OpenRun
from tasks.side_effects import artifact_key, side_effect

SETTINGS = {"SGLang": "sglang.json", "vLLM": "vllm.json"}
"""Files of `export/serving` by engine."""


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
        devices=device_time(run.folder, run.config.plan.price_per_hour),
        is_served=bool(ExportRecord.read(run.folder.exported).layouts),
        settings_for=[name for name, file in SETTINGS.items() if (run.folder.export / "serving" / file).is_file()],
    )  # fmt: skip
    write_files(run, facts)
    tracking = TrackedRun.read(run.tracking_record)
    tags = {"gate": "passed" if result.gate.passed else "not passed", "version": f"{draft.name} {draft.version}"}
    describe_run(tracking, run_markdown(facts), tags, [run.folder.report, run.folder.report_page])
    page = run_markdown(facts, run.folder.plots)
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
        "plan": facts.planned,
        "gpu_hours": dict(facts.devices.hours),
        "gpu_busy": dict(facts.devices.busy),
        "cost": facts.devices.cost,
        **benchmark_report(facts.result),
        "draft": {
            "name": draft.name,
            "version": draft.version,
            "alias": ", ".join(draft.aliases) or None,
            "model_id": draft.model_id,
        },
    }
    report["target"] |= facts.target.model_dump(include={"name", "revision", "licence"})
    write_atomically(run.folder.report, json.dumps(report, indent=2) + "\n")
    write_atomically(run.folder.report_page, run_html(facts, run.folder.plots))


def links(run: OpenRun) -> Iterator[Link]:
    """Links to pages with more about the run."""
    yield tracking_link(TrackedRun.read(run.tracking_record))
    page = url_for("flow-run", obj_id=flow_run.id) if flow_run.id and not prefect_is_private() else None
    yield Link("Prefect flow run", page or f"draftsmith ui  # flow run {run.folder.name}", page)
    yield Link("Run folder", str(run.folder.path))
    files = {"Exported draft": run.folder.export, "Logs": run.folder.logs, "The same as data": run.folder.report}
    if run.folder.stitched.is_dir():
        files["Target with the trained MTP layer"] = run.folder.stitched
    yield from (Link(name, path.name, path.name) for name, path in files.items())


def tracking_link(tracking: TrackedRun) -> Link:
    """The run's page in MLflow, or how to open it where no server is behind the address."""
    uri = redacted(tracking.uri)
    if uri.startswith(("http://", "https://")):
        page = f"{uri.rstrip('/')}/#/experiments/{tracking.experiment_id}/runs/{tracking.run_id}"
        return Link("MLflow run", page, page)
    return Link("MLflow run", f"mlflow ui --backend-store-uri {shlex.quote(uri)}  # run {tracking.run_id}")


def training_report(trained: TrainingResult, progress: SampleProgress) -> dict[str, Any]:
    """What was trained: samples, tokens, time."""
    shown = trained.model_dump(mode="json", exclude_none=True)
    told = ("steps", "wall_s", "checkpoint_stall_s", "peak_gpu_bytes", "final_loss", "acceptance_by_position",
            "vocabulary_coverage")  # fmt: skip
    return {
        "samples": {
            "total": progress.total,
            "consumed": progress.consumed,
            "quarantined": progress.quarantined,
            "capture_failures": progress.attempts,
        },
        "tokens": trained.tokens,
        "train": {
            **{name: shown[name] for name in told if name in shown},
            "token_coverage": trained.token_coverage,
            "data_wait_share": trained.data_wait_share,
            "tokens_per_s": trained.tokens_per_s,
            "slow_side": slow_side(trained.rates),
            "bottleneck": in_words(trained.rates),
        },
    }


def benchmark_report(result: BenchmarkResult) -> dict[str, Any]:
    """The benchmark in a page: acceptance and its baselines, lossless decoding, speed, the gate, the conditions."""
    at, lookup = result.conditions.lookahead, result.prompt_lookup_sampled
    shown = result.model_dump(mode="json")
    lengths = {"draft": "acceptance"} | {name: name for name in ("reference", "sampled", "sampled_drawn")}
    return {
        "traffic": result.traffic,
        "target": {
            "distinct_token_share": result.target_distinct_token_share,
            "sampled_distinct_token_share": result.sampled_distinct_token_share,
        },
        "acceptance": {
            name: shown[field] and {part: shown[field][part] for part in ("length", "by_position")}
            for name, field in lengths.items()
        }
        | {name: shown[name] for name in ("served", "gap", "counts_identical")},
        "baseline": {
            "prompt_lookup": result.prompt_lookup.length[at],
            "prompt_lookup_length": shown["prompt_lookup"]["length"],
            "prompt_lookup_sampled": lookup and lookup.length[at],
            **{key(name): of.length[at] for name, of in result.more_baselines.items()},
            **{f"{key(name)}_sampled": of.length[at] for name, of in result.more_baselines_sampled.items()},
            "not_beaten": result.unbeaten,
        },
        "lossless": {name: shown["lossless"][name] for name in ("tokens", "mismatches", "ties")},
        "goodput": result.goodput and [load.model_dump(mode="json") for load in result.goodput.by_load],
        **{name: shown[name] for name in ("speed", "gate", "conditions", "summary")},
    }
