"""Writes the run's report: `report.json` for machines, Prefect artifacts for people."""

import json
from typing import Any

from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE

from infra.bottleneck import in_words, slow_side
from infra.files import write_atomically
from infra.records import (
    Acceptance,
    BenchmarkResult,
    Progress,
    RegisteredDraft,
    SamplesRecord,
    TargetRecord,
    TrainingResult,
)
from tasks.registry import acceptance_table
from tasks.run import OpenRun


@task(name="write report", retries=1, cache_policy=NO_CACHE)
def write_report(
    run: OpenRun,
    target: TargetRecord,
    samples: SamplesRecord,
    trained: TrainingResult,
    result: BenchmarkResult,
    draft: RegisteredDraft,
) -> None:
    """Write `report.json`, show the result in the log and as artifacts of the flow run."""
    with run.open_ledger() as ledger:
        progress = ledger.progress()
    report = {
        "run": run.folder.name,
        "data": samples.model_dump(exclude={"path"}),
        **training_report(trained, progress),
        **benchmark_report(result),
        "draft": {"name": draft.name, "version": draft.version, "alias": _alias(draft), "model_id": draft.model_id},
    }
    report["target"] |= target.model_dump(include={"name", "revision", "licence"})
    write_atomically(run.folder.report, json.dumps(report, indent=2) + "\n")
    table = acceptance_table(result)
    create_table_artifact(dict(table), key="acceptance-length", description="Acceptance length by lookahead")
    create_markdown_artifact(_in_words(run, result, draft), key="report", description="What the run came to")
    get_run_logger().info("%s\nreport: %s", result.summary, run.folder.report)


def _alias(draft: RegisteredDraft) -> str | None:
    return ", ".join(draft.aliases) or None


def training_report(trained: TrainingResult, progress: Progress) -> dict[str, Any]:
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
            "final_loss": trained.final_loss,
            "acceptance_by_position": trained.acceptance_by_position,
            "vocabulary_coverage": trained.vocabulary_coverage,
            "slow_side": slow_side(trained.rates),
            "bottleneck": in_words(trained.rates),
        },
    }


def benchmark_report(result: BenchmarkResult) -> dict[str, Any]:
    """What the draft is worth: acceptance beside its baseline, lossless decoding, speed, the gate, the conditions."""
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
            "gap": result.gap,
            "counts_identical": result.counts_identical,
        },
        "baseline": {
            "prompt_lookup": result.prompt_lookup.length[lookahead],
            "prompt_lookup_length": dict(result.prompt_lookup.length),
            "prompt_lookup_sampled": result.prompt_lookup_sampled.length[lookahead],
            "beats_prompt_lookup": result.beats_prompt_lookup,
        },
        "lossless": result.lossless.model_dump(mode="json", include={"tokens", "mismatches", "ties"}),
        "speed": result.speed.model_dump(mode="json"),
        "gate": result.gate.model_dump(mode="json"),
        "conditions": result.conditions.model_dump(mode="json"),
        "summary": result.summary,
    }


def _lengths(acceptance: Acceptance) -> dict[str, Any]:
    return {"length": dict(acceptance.length), "by_position": list(acceptance.by_position)}


def _in_words(run: OpenRun, result: BenchmarkResult, draft: RegisteredDraft) -> str:
    verdict = "passed" if result.gate.passed else "not passed"
    return (
        f"# {run.folder.name}\n\n{result.summary}\n\n"
        f"- Draft: `{draft.name}` version {draft.version} ({_alias(draft) or 'no alias'})\n"
        f"- Gate {verdict}: {result.gate.reason}\n"
        f"- Lossless: {result.lossless.tokens} tokens, {result.lossless.mismatches} mismatches, "
        f"{result.lossless.ties} ties\n- Files: `{run.folder.path}`\n"
    )
