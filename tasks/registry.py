"""Tracks a run in MLflow and registers its draft with figures and evidence."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from uuid import UUID

from prefect import get_run_logger
from prefect.client.orchestration import get_client
from prefect.runtime import flow_run
from prefect.utilities.urls import url_for

from infra.drift.config import WatchConfig
from infra.drift.sequential import DriftTest, Reference
from infra.drift.store import is_prompt_sample
from infra.markdown import escaped
from infra.provenance import git_sha, hardware, versions
from infra.quantities import plural, signed
from infra.records.acceptance import BenchmarkResult, RegisteredDraft, RequestCounts
from infra.records.benchmark_text import key, shown_lookaheads, sources
from infra.records.data_path import SamplesRecord, TargetRecord, TrainingResult
from infra.records.drafts import CapturePrecision, ExportRecord
from infra.refusal import Refusal, first_line
from infra.run.device_time import DeviceTime, device_time
from infra.settings import runs_folder
from infra.tracking import registry
from infra.tracking.client import NOTE, REGISTRY_ERRORS
from infra.tracking.datasets import evaluation_set, log_samples, log_suites
from infra.tracking.permissions import check_writable
from infra.tracking.retention import identity, note_experiment
from infra.tracking.runs import (
    FOLDER,
    RUNS,
    TrackedRun,
    end_run,
    log_benchmark,
    log_checkpoint,
    log_figures,
    log_folder,
    log_new_metrics,
    logged_checkpoints,
    restore,
    start_run,
)
from infra.user import user_name
from tasks.report.page import version_markdown
from tasks.run import OpenRun
from tasks.side_effects import draft_tag, side_effect

ABOUT = (
    f"Drafts for speculative decoding of **{{target}}**, {registry.MADE_BY}. The alias `champion` is the version that "
    "serving takes; `challenger` is the newest that has not earned that. Each version's description says what it "
    "accepts, under which conditions, and what the gate decided."
)


@side_effect("register draft")
def register_draft(
    run: OpenRun,
    tracking: TrackedRun,
    target: TargetRecord,
    trained: TrainingResult,
    export: ExportRecord,
    result: BenchmarkResult,
) -> RegisteredDraft:
    """Log export and benchmark, and register them as the challenger; a resumed run completes what it registered."""
    used = device_time(run.folder, run.config.plan.price_per_hour)
    registered = registry.version_of_run(tracking.uri, run.draft_name, run.folder.name)
    if registered:
        model_id = registered.model_id
    else:
        model_id = _log_draft(run, tracking, trained, export, result)
        hours = {f"gpu_hours/{role}": hours for role, hours in used.hours.items()}
        log_figures(tracking, model_id, hours | {f"gpu_busy/{role}": share for role, share in used.busy.items()})
    champion = RegisteredDraft.read(run.folder.champion) if run.folder.champion.exists() else None
    unwatchable = why_unwatchable(RequestCounts.read(run.folder.request_counts))
    tags = {
        registry.RUN: run.folder.name,
        registry.WEIGHTS_SHA256: export.sha256["model.safetensors"],
        registry.MEASURED_AGAINST: str(champion.version) if champion else "",
        registry.ACCEPTANCE: f"{result.length:.4f}",
        registry.TRAFFIC: result.traffic,
        registry.COUNTED_BY: result.conditions.engine,
        **_precision(run),
        "lookahead": str(result.conditions.lookahead),
        **_goodput(result),
        "beats_prompt_lookup": str("prompt lookup" not in result.unbeaten).lower(),
        "not_beaten": "; ".join(result.unbeaten) or "none",
        registry.GATE: "passed" if result.gate.passed else "not passed",
        registry.UNPROVEN: str(result.gate.unproven).lower(),
        "target": target.name,
        "target_revision": target.revision,
        **_lineage(export),
        "dataset_hash": result.conditions.dataset_hash,
        "git_sha": git_sha(),
        **_used(used),
        "drift_test": unwatchable or "possible",
    }
    draft = registry.register(
        tracking.uri,
        run.draft_name,
        model_id,
        tracking.run_id,
        tags,
        about=ABOUT.format(target=escaped(target.name)),
        description=version_markdown(target, result),
    )
    get_run_logger().info("registered version %s of %s", draft.version, draft.name)
    if unwatchable:
        get_run_logger().warning("watch-traffic cannot watch version %s: %s", draft.version, unwatchable)
    return draft


def _log_draft(
    run: OpenRun, tracking: TrackedRun, trained: TrainingResult, export: ExportRecord, result: BenchmarkResult
) -> str:
    """Log a draft with its benchmark; the id of the logged model."""
    layouts = ", ".join(export.layouts) or "none"
    model_id = log_folder(tracking, run.folder.export, "draft", trained.steps, "draft", layout=layouts)
    log_benchmark(
        tracking,
        model_id,
        metrics=_figures(result),
        curves=_curves(result),
        conditions=result.conditions.model_dump(),
        table=acceptance_table(result),
        files=[*sorted(run.folder.plots.glob("*.png")), run.folder.request_counts, run.folder.gate],
        dataset=evaluation_set(tracking),
    )
    log_suites(tracking, [(suite.name, suite.dataset_hash, suite.name) for suite in result.suites])
    return model_id


def _precision(run: OpenRun) -> dict[str, str]:
    """Tags of how the hidden states were computed."""
    precision: CapturePrecision = CapturePrecision.read(run.folder.precision)
    return {registry.QUANTIZATION: precision.quantization or "", registry.KERNELS: precision.how}


def _goodput(result: BenchmarkResult) -> dict[str, str]:
    """Tags of what is predicted at the main load; none where step costs were not measured."""
    if result.goodput is None:
        return {}
    best, load = result.goodput.best, result.goodput.main_load
    alone = next(row for row in result.goodput.draft.rows if (row.batch, row.lookahead) == (load, 0))
    told = f"{best.tokens_per_s:,.0f} tokens/s with {plural(load, 'text')} at once"
    gain = f", {signed(best.tokens_per_s / alone.tokens_per_s - 1)} against the target alone"
    return {"best_lookahead": str(best.lookahead), registry.GOODPUT: told + gain}


def _used(devices: DeviceTime) -> dict[str, str]:
    """Tags of what the run has taken."""
    cost = {} if devices.cost is None else {registry.COST: f"{devices.cost:.2f}"}
    busy = {} if devices.mean_busy is None else {registry.GPU_BUSY: f"{devices.mean_busy:.4f}"}
    return {registry.GPU_HOURS: f"{devices.total:.4f}", **busy, **cost}


def _lineage(export: ExportRecord) -> dict[str, str]:
    """Tags of the draft that training started from, and of the target that it was trained for; none of a new draft."""
    start = export.started_from
    found = {} if start is None else start.model_dump(exclude_none=True)
    if start is not None and start.precision is not None:
        found["precision"] = start.precision.how
    return {("started_from" if name == "draft" else f"started_from_{name}"): value for name, value in found.items()}


def why_unwatchable(counts: RequestCounts) -> str | None:
    """Why the benchmark is too small for the drift test at its default settings; None if it is large enough."""
    defaults = WatchConfig.model_fields
    try:
        reference = Reference.of(counts.greedy[counts.conditions.lookahead])
        DriftTest(reference, defaults["fall"].default, defaults["average_run_length"].default)
    except Refusal as refusal:
        return str(refusal)
    return None


def acceptance_table(result: BenchmarkResult) -> dict[str, list[float | int | None]]:
    """Acceptance length by lookahead, one column per source of proposals."""
    lookaheads = shown_lookaheads(result)
    columns = {name: [of.length.get(at) for at in lookaheads] for name, of in sources(result).items()}
    return {"lookahead": [*lookaheads], **columns}


def _figures(result: BenchmarkResult) -> dict[str, float]:
    lookahead = result.conditions.lookahead
    figures = {
        "acceptance_length": result.length,
        "benchmark/acceptance_length_greedy": result.acceptance.length[lookahead],
        "benchmark/acceptance_length_reference": result.reference and result.reference.length[lookahead],
        "benchmark/acceptance_length_sampled": result.sampled and result.sampled.length[lookahead],
        "benchmark/acceptance_length_sampled_drawn": result.sampled_drawn and result.sampled_drawn.length[lookahead],
        "benchmark/target_distinct_token_share": result.target_distinct_token_share,
        "benchmark/lossless_mismatches": result.lossless.mismatches,
        "benchmark/plain_tokens_per_s": result.speed.plain_tokens_per_s,
        "benchmark/gate_lower_bound": result.gate.lower_bound,
        **{
            f"benchmark/acceptance_length_{key(name)}": of.length[lookahead]
            for name, of in result.baselines_on(result.traffic).items()
        },
        "benchmark/speculative_tokens_per_s": result.speed.speculative_tokens_per_s,
    }
    return {name: value for name, value in figures.items() if value is not None}


def _curves(result: BenchmarkResult) -> dict[str, dict[int, float]]:
    """What MLflow draws over lookahead."""
    shown = {
        "draft": result.acceptance,
        "prompt_lookup": result.prompt_lookup,
        **{key(name): of for name, of in result.more_baselines.items()},
        "champion": result.champion,
        "champion_sampled": result.champion_sampled,
        "draft_sampled": result.sampled,
        "draft_sampled_drawn": result.sampled_drawn,
    }
    curves = {f"acceptance_length_by_lookahead/{name}": dict(of.length) for name, of in shown.items() if of}
    for row in result.goodput.draft.rows if result.goodput else ():
        curves.setdefault(f"goodput_by_lookahead/{row.batch}_at_once", {})[row.lookahead] = row.tokens_per_s
    return curves


@contextmanager
def tracked(run: OpenRun) -> Iterator[TrackedRun]:
    """The MLflow run of this run; it ends as FINISHED, FAILED, or (interrupted, cancelled) KILLED."""
    with ExitStack() as stack:
        tracking = open_tracking(run)
        stack.push(lambda kind, *_: _end(tracking, _status(kind)))
        yield tracking


def _end(tracking: TrackedRun, status: str) -> None:
    """An MLflow that is away makes no failure of a finished run, and hides no error."""
    try:
        end_run(tracking, status)
    except REGISTRY_ERRORS as error:
        why = f"MLflow run {tracking.run_id} could not be ended as {status}"
        get_run_logger().warning("%s, and stays RUNNING: %s", why, first_line(error))


def _status(kind: type[BaseException] | None) -> str:
    if kind is None:
        return "FINISHED"
    return "FAILED" if issubclass(kind, Exception) else "KILLED"


@side_effect("open tracking")
def open_tracking(run: OpenRun) -> TrackedRun:
    """Start the MLflow run with configuration, code, versions and hardware, or continue the existing one.

    The flow run is given the run's name: all pages then speak of the same thing. Raises Refusal where MLflow denies
    writing what the run will write.
    """
    tags = {
        "target": run.config.target.name,
        "git_sha": git_sha(),
        "hardware": hardware(),
        RUNS: identity(run.folder.path.parent),
        FOLDER: run.folder.name,
        **versions(),
        "mlflow.user": user_name(),
        "mlflow.source.name": f"draftsmith retrain {run.folder.name}",
        "mlflow.source.type": "JOB",
        NOTE: f"Trains a draft for {run.config.target.name}. What the run came to is written here when it has ended.",
    }
    if flow_run.id:
        with get_client(sync_client=True) as client:
            about = sorted({*flow_run.tags, draft_tag(run.draft_name)})
            client.update_flow_run(UUID(flow_run.id), name=run.folder.name, tags=about)
        tags["prefect.flow_run"] = url_for("flow-run", obj_id=flow_run.id) or str(flow_run.id)
    config = run.config.model_dump(mode="json")
    settings = run.config.tracking
    check_writable(run.tracking_uri, settings.experiment, run.draft_name, datasets=settings.dataset_mib > 0)
    note_experiment(runs_folder(), settings.experiment)
    tracking = start_run(run.tracking_record, run.tracking_uri, settings.experiment, run.folder.name, config, tags)
    get_run_logger().info("MLflow run %s at %s", tracking.run_id, tracking.uri)
    return tracking


@side_effect("track samples")
def track_samples(run: OpenRun, tracking: TrackedRun, samples: SamplesRecord) -> None:
    """Note the sample set, and keep a copy of it where MLflow's artifacts are."""
    source = run.config.data.source
    private = run.config.generator.live is not None or is_prompt_sample(source)
    log_samples(tracking, source, samples, most_mib=run.config.tracking.dataset_mib, private=private)


@side_effect("track training")
def track_training(run: OpenRun, tracking: TrackedRun) -> None:
    """Log the metrics that are still missing, and every committed checkpoint as a logged model."""
    restore(tracking)  # what follows would fail, hours after a person deleted it
    log_new_metrics(run.tracking_record, run.folder.metrics)
    logged = logged_checkpoints(tracking)
    with run.open_ledger() as ledger:
        committed = ledger.checkpoints()
    for record in committed:
        folder = run.folder.path / record.path
        if folder.is_dir() and record.step not in logged:
            log_checkpoint(tracking, folder, record.step, run.folder.metrics)
