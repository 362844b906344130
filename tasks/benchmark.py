"""Measures the exported draft on the held-out prompts, beside the present champion."""

import shutil

from prefect import get_run_logger

from infra.files.atomic import write_atomically
from infra.pools.base import Pool
from infra.records.acceptance import BenchmarkResult, RegisteredDraft
from infra.records.data_path import TargetRecord
from infra.tracking.registry import champion, download, version_of_run
from tasks.data_plane import run_main, side_effect
from tasks.run import OpenRun

TIMEOUT_S = 6 * 3600.0


@side_effect("benchmark", retries=1)
def benchmark_draft(run: OpenRun, pool: Pool, target: TargetRecord) -> BenchmarkResult:
    """Measure challenger and champion on the same prompts in one job.

    A resumed run that has registered its draft keeps the figures it was registered with.
    """
    registered = version_of_run(run.tracking_uri, run.draft_name, run.folder.name)
    if registered and run.folder.benchmark.exists():
        return BenchmarkResult.read(run.folder.benchmark)
    present = champion(run.tracking_uri, run.draft_name)
    run.folder.champion.unlink(missing_ok=True)
    if present:
        write_atomically(run.folder.champion, present)
    arguments: list[str] = []
    if present and _comparable(present, target):
        folder = run.folder.path / "champion"
        shutil.rmtree(folder, ignore_errors=True)
        downloaded = download(run.tracking_uri, present, folder)
        arguments = ["--champion", str(downloaded), "--champion-label", f"version {present.version}"]
    run_main(run, pool, "benchmark", "models.benchmark.run", *arguments, timeout_s=TIMEOUT_S)
    return BenchmarkResult.read(run.folder.benchmark)


@side_effect("serving benchmark", retries=1)
def benchmark_served(run: OpenRun, pool: Pool) -> None:
    """The exported draft in the serving engine, where that is the run's engine; the benchmark joins its figures."""
    if run.config.generator.engine == "sglang" and run.config.benchmark.served_concurrency:
        run_main(run, pool, "serving-benchmark", "models.benchmark.served", timeout_s=TIMEOUT_S)


def _comparable(present: RegisteredDraft, target: TargetRecord) -> bool:
    logger = get_run_logger()
    if present.tags.get("target_revision") != target.revision:
        logger.warning("champion %s is of another target revision: compared with no draft", present.version)
        return False
    logger.info("compared with version %s of %s, the champion", present.version, present.name)
    return True
