"""Whole retrainings on one GPU: generators and trainer use it at the same time, or take turns."""

import json
import os
import subprocess
import sys

from gpu_stages.base import AbsentError, Bench, check
from gpu_stages.training import END_S, RECIPE, recipe_settings
from infra.files.run_folder import RunFolder
from infra.records.acceptance import BenchmarkResult
from infra.records.sharing import read_sharing

START = "from flows.command_line import main; main()"
SMALL = (
    "training.max_steps=60", "benchmark.prompts=16", "benchmark.max_new_tokens=32", "benchmark.reference_tokens=128",
    "benchmark.timed_tokens=32", "benchmark.loads=[]",
    "benchmark.served_concurrency=[]", "promotion.smoke_prompts=2",
)  # fmt: skip


def share(bench: Bench) -> None:
    """Both at once."""
    if not bench.is_gpu:
        raise AbsentError("pools.sharing=share divides the memory of a GPU")
    _retrain(bench, "share")


def alternate(bench: Bench) -> None:
    """By turns."""
    _retrain(bench, "alternate")


def _retrain(bench: Bench, mode: str) -> None:
    pools = ["pools.inference_gpus=1", "pools.training_gpus=1", "generator.engine=sglang"] if bench.is_gpu else []
    settings = [*recipe_settings(bench), *SMALL, *bench.pick([], ["training.max_steps=8", "benchmark.prompts=8"])]
    command = [sys.executable, "-c", START, "retrain", str(RECIPE), f"pools.sharing={mode}"]
    runs = bench.work / bench.stage
    environment = {
        **os.environ,
        "DRAFTSMITH_RUNS": str(runs),
        "MLFLOW_TRACKING_URI": f"sqlite:///{bench.work / bench.stage}.db",
    }
    environment.pop("PREFECT_API_URL", None)
    ended = subprocess.run([*command, *settings, *pools], env=environment, check=False, timeout=END_S)
    check(ended.returncode == 0, f"draftsmith retrain ended with status {ended.returncode}: its output is above")
    (run,) = (RunFolder(path.parent) for path in runs.glob("*/config.json"))
    result = BenchmarkResult.read(run.benchmark)
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    bench.note(
        mode=read_sharing(run).mode, steps=lines[-1]["step"], tokens_per_s=lines[-1]["tokens_per_s"],
        acceptance_length=result.acceptance.length[result.conditions.lookahead],
    )  # fmt: skip
    check(read_sharing(run).mode == mode, f"the run was trained in the mode {read_sharing(run).mode}, not {mode}")
