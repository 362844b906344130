"""A fine-tuned target continues from the draft of its base: how many tokens that saves against a new draft.

    python benchmarks/continued.py [--seeds 0 1] [--results FOLDER]

The base is the tiny target, whose draft is trained in 400 steps by recipes/tiny.yaml. The fine-tuned target is the base
after 200 more steps on the same documentation in lower case. Drafts for it are trained on lower-case text: one from
scratch in 400 steps, others from the base's draft in 180 and 80. Compared is the acceptance length of the averaged
weights on the same 64 held-out prompts at the end of training, by the simulated walk of models/training/heldout.py.
Writes benchmarks/results/continued.json; about ten minutes on two cores.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from prepared import capture_train_export, prepared_run, trained_export
from torch.nn import functional
from transformers import AutoTokenizer, LlamaForCausalLM

from infra.files.atomic import write_atomically
from infra.processes.exit import run_main
from infra.provenance import git_sha, hardware
from infra.records.data_path import HELDOUT_LENGTH, TrainingResult
from models.config.recipe import load_recipe
from models.data import python_docs
from models.targets.prepare import prepare_target

ROOT = Path(__file__).parents[1]
RECIPE, RESULTS = ROOT / "recipes" / "tiny.yaml", Path(__file__).parent / "results"
TIMEOUT_S = 1800.0
TUNING_STEPS, BATCH, LENGTH, LEARNING_RATE = 200, 4, 192, 1e-3
STEPS, CONTINUED = 400, (180, 80)
"""Steps of a new draft, and of those that continue. Samples differ in length, so half of the steps may be more than
half of the tokens."""


def lower_case(folder: Path) -> Path:
    """The documentation in lower case, as a source of samples."""
    path = folder / "lower.jsonl"
    lines = (json.dumps({"text": text.lower()}) + "\n" for _, text in python_docs.documents())
    path.write_text("".join(lines))
    return path


def fine_tuned(base: Path, folder: Path, steps: int = TUNING_STEPS) -> Path:
    """The base after `steps` steps on lower-case text, in `folder`; deterministic."""
    model, tokenizer = LlamaForCausalLM.from_pretrained(base), AutoTokenizer.from_pretrained(base)
    texts = [text.lower() for _, text in python_docs.documents()][1::6]
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    stream = torch.tensor([token for ids in encoded for token in (*ids, tokenizer.eos_token_id)])
    generator, offsets = torch.Generator().manual_seed(0), torch.arange(LENGTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    for _ in range(steps):
        starts = torch.randint(0, len(stream) - LENGTH, (BATCH, 1), generator=generator)
        batch = functional.pad(stream[starts + offsets], (1, 0), value=tokenizer.bos_token_id)
        loss = functional.cross_entropy(model(input_ids=batch[:, :-1]).logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def trained(path: Path, overrides: list[str], start: Path | None) -> dict[str, Any]:
    """Train a draft, from the export `start` if there is one: its tokens, and its held-out acceptance lengths."""
    if start is not None:
        overrides = [*overrides, f"training.start_from={start}"]
    with prepared_run(path, RECIPE, overrides) as run:
        if start is not None:
            fetching = [sys.executable, "-m", "models.export.published", str(path)]
            subprocess.run(fetching, check=True, timeout=TIMEOUT_S)
        capture_train_export(run, TIMEOUT_S)
        lines = [json.loads(line) for line in run.folder.metrics.read_text().splitlines()]
        measured = {line["step"]: round(line[HELDOUT_LENGTH], 4) for line in lines if line.get(HELDOUT_LENGTH)}
        result: TrainingResult = TrainingResult.read(run.folder.training)
        assert list(measured)[-1] == result.steps, "the last step is measured"
        return {"tokens": result.tokens, "steps": result.steps, "length": measured[result.steps], "by_step": measured}


def compare(seed: int, tuned: Path, source: Path, folder: Path) -> dict[str, Any]:
    """One seed: the base's draft, a new one, and those that continue."""
    base = trained_export(folder / "base", RECIPE, [f"seed={seed}", f"training.max_steps={STEPS}"])
    found: dict[str, Any] = {"seed": seed, "continued": []}
    for steps in (STEPS, *CONTINUED):
        overrides = [f"seed={seed}", "target.source=huggingface", f"target.name={tuned}", f"data.source={source}"]
        overrides += ["training.heldout_prompts=64", "training.heldout_steps=20", "training.log_steps=20"]
        overrides += [f"training.max_steps={steps}"]
        one = trained(folder / f"steps-{steps}", overrides, base if steps < STEPS else None)
        if steps == STEPS:
            found["scratch"] = one
        else:
            found["continued"].append({"tokens_share": one["tokens"] / found["scratch"]["tokens"]} | one)
        print(seed, steps, one, flush=True)
    reached = [one["tokens_share"] for one in found["continued"] if one["length"] >= found["scratch"]["length"]]
    return found | {"reached_at_share": min(reached, default=None)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    begun, runs = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        base = Path(prepare_target(load_recipe(RECIPE).target).path)
        tuned, source = fine_tuned(base, folder / "tuned"), lower_case(folder)
        for seed in options.seeds:
            runs.append(compare(seed, tuned, source, folder / str(seed)))
            shutil.rmtree(folder / str(seed))
    result = {
        "target": "tiny-llama, 200 more steps on lower-case text",
        "recipe": RECIPE.stem,
        "seeds": runs,
        "commit": git_sha(),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": hardware(),
        "seconds": round(time.perf_counter() - begun),
    }
    write_atomically(options.results / "continued.json", json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    run_main(main)
