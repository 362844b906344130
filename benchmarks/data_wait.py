"""How long the trainer waits for data when hidden states come at twice its own rate.

A publisher process leases samples and writes ready-made buffers (no target runs). The first pass publishes as fast
as it can and tells the trainer's own rate; the second is held to twice that. Both rates and the share of the step spent
waiting, start-up excluded, go to benchmarks/results/data_wait.json.

    python benchmarks/data_wait.py [--recipe recipes/quickstart.yaml] [--samples 120]
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from prepared import prepared_run

from infra.files.atomic import write_atomically
from infra.ledger.generators import Publication
from infra.provenance import git_sha, hardware
from models.run import PreparedRun
from models.targets.hidden_states import HiddenStates

RESULT = Path(__file__).parent / "results" / "data_wait.json"


def publish(path: Path, tokens_per_s: float | None) -> None:
    """Publish random hidden states of every leased sample, no faster than `tokens_per_s`."""
    torch.set_num_threads(1)
    run = PreparedRun.open(path)
    ledger, transport, layout = run.open_ledger(), run.open_transport(), run.layout
    longest = run.samples.longest
    ready = HiddenStates(
        aux=torch.randn(longest, layout.aux_count * layout.hidden_size).to(layout.dtype),
        last=torch.randn(longest, layout.hidden_size).to(layout.dtype),
        top=torch.zeros(longest, dtype=torch.int32),
    )
    started, published = time.monotonic(), 0
    while not ledger.finished():
        leases = ledger.lease("publisher", run.config.generator.leased)
        for lease in leases:
            part = ready.rows(slice(0, lease.tokens))
            ledger.publish(Publication(lease, transport.put(ledger.key(lease), layout.pack(part))))
            published += lease.tokens
            if tokens_per_s is not None:
                time.sleep(max(0.0, started + published / tokens_per_s - time.monotonic()))
        if not leases:
            time.sleep(0.02)
            started, published = time.monotonic(), 0


def measure(base: Path, name: str, recipe: Path, overrides: list[str], tokens_per_s: float | None) -> dict[str, float]:
    """Train once; rates over the progress lines after the first (which holds the start-up)."""
    with prepared_run(base / name, recipe, overrides) as run:
        folder = run.folder
        publisher = multiprocessing.get_context("spawn").Process(target=publish, args=(folder.path, tokens_per_s))
        publisher.start()
        launch = [sys.executable, "-m", "models.training.launch", str(folder.path)]
        subprocess.run(launch, check=True, timeout=3600)
        publisher.join(timeout=60)
    first, *lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    seconds = lines[-1]["seconds"] - first["seconds"]
    spans = [later["seconds"] - earlier["seconds"] for earlier, later in zip([first, *lines], lines, strict=False)]
    waited = sum(span * line["data_wait_share"] for span, line in zip(spans, lines, strict=True))
    return {"tokens_per_s": (lines[-1]["tokens"] - first["tokens"]) / seconds, "data_wait_share": waited / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=Path("recipes/quickstart.yaml"))
    parser.add_argument("--samples", type=int, default=120)
    parser.add_argument("--json", type=Path, default=RESULT)
    arguments = parser.parse_args()
    overrides = [f"data.max_samples={arguments.samples}", "training.log_steps=5"]
    with tempfile.TemporaryDirectory() as base:
        name = f"data-wait-{os.getpid()}"
        free = measure(Path(base), f"{name}-free", arguments.recipe, overrides, None)
        held = measure(Path(base), f"{name}-held", arguments.recipe, overrides, 2 * free["tokens_per_s"])
    result = {
        "recipe": arguments.recipe.name,
        "samples": arguments.samples,
        "publisher_as_fast_as_it_can": free,
        "publisher_at_twice_the_trainers_rate": held,
        "commit": git_sha(),
        "hardware": hardware(),
    }
    write_atomically(arguments.json, json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
