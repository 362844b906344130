"""Exports the trained draft in serving engines' layouts."""

from prefect import task
from prefect.cache_policies import NO_CACHE

from infra.records.data_path import ExportRecord
from tasks.data_plane import on_cpu, run_main, worth_retrying
from tasks.run import OpenRun

TIMEOUT_S = 3600.0


@task(name="export draft", retries=1, retry_condition_fn=worth_retrying, cache_policy=NO_CACHE)
def export_draft(run: OpenRun) -> ExportRecord:
    """Write the final checkpoint as a Hugging Face folder that SGLang and vLLM read, with a model card."""
    run_main(run, on_cpu(run), "export", "models.export.sglang", timeout_s=TIMEOUT_S)
    return ExportRecord.read(run.folder.exported)
