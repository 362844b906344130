"""Exports the trained draft in serving engines' layouts."""

from infra.records.data_path import ExportRecord
from tasks.data_plane import on_cpu, run_main, side_effect
from tasks.run import OpenRun

TIMEOUT_S = 3600.0


@side_effect("export draft", retries=1)
def export_draft(run: OpenRun) -> ExportRecord:
    """Write the final checkpoint as a Hugging Face folder that SGLang and vLLM read, with a model card."""
    run_main(run, on_cpu(run), "export", "models.export.sglang", timeout_s=TIMEOUT_S)
    return ExportRecord.read(run.folder.exported)
