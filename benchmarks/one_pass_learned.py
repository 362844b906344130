"""What a draft learns in one pass, while the target answers, and in two: the same prompts, several seeds.

Both ways with a real SGLang on the CPU, in the target's default data type: `data.regeneration.capture` on and off, the
rest of the recipe alike. The answers are sampled, so the texts differ as they do between two seeds. The target's own
continuations of prompts that no draft has seen are then read by all drafts, at temperature 1 and greedy.

    python benchmarks/one_pass_learned.py [--targets tiny gemma3-270m] [--seeds 0 1 2] [--samples 400] [--prompts 48]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import cpu_model
from offline import Texts
from prepared import capture_train_export
from transformers import PreTrainedTokenizerBase

from infra.files.atomic import write_atomically
from infra.files.run_folder import RunFolder
from infra.processes.exit import run_main
from infra.provenance import git_sha, hardware
from models.benchmark.contestants import load_contestants
from models.benchmark.paired import length_interval
from models.config.recipe import RunConfig, load_recipe
from models.data import python_docs
from models.data.samples import text_prefix
from models.data.tokenizer import read_tokenizer
from models.decoding.acceptance import acceptance_length
from models.drafts.sampling import GREEDY, Sampling
from models.run import PreparedRun
from models.targets.prepare import prepare_target

RESULT = Path(__file__).parent / "results" / "one_pass_learned.json"
RECIPES = {"tiny": "tiny", "gemma3-270m": "quickstart"}
CHARACTERS, PROMPT, ANSWER, LOOKAHEAD, RUN_S = 800, 32, 96, 4, 3600.0
STAGES = ("models.regeneration.regenerate", "models.data.prepare")


def documents() -> tuple[list[str], list[str]]:
    """Texts to learn from, and texts that are kept apart: the language reference."""
    learned, apart = list[str](), list[str]()
    for place, text in python_docs.documents():
        (apart if place.startswith("topic ") else learned).append(text)
    return learned, apart


def trained(folder: Path, name: str, options: argparse.Namespace, seed: int, one_pass: bool) -> dict[str, Any]:
    """A draft, and the seconds that it took."""
    run, source = RunFolder(folder), folder.with_suffix(".jsonl")
    # Both answer all that they are given; a tenth is held out.
    texts = documents()[0][: round(1.2 * options.samples)]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    settings = {"temperature": 0.7, "max_new_tokens": ANSWER, "prompt_tokens": PROMPT, "capture": one_pass}
    overrides = [f"data.source={source}", f"data.regeneration={json.dumps(settings)}", "generator.engine=sglang"]
    overrides += [f"data.max_tokens={PROMPT + 1 + ANSWER}", "data.overlong=truncate", f"seed={seed}"]
    overrides += [f"data.max_samples={options.samples}", "training.heldout_steps=0", "generator.compute_dtype=null"]
    config = load_recipe(Path(__file__).parents[1] / "recipes" / f"{RECIPES[name]}.yaml", overrides)
    write_atomically(run.config, config)
    write_atomically(run.target, prepare_target(config.target))
    begun, before = time.perf_counter(), sum(os.times()[2:4])
    for stage in STAGES:
        subprocess.run([sys.executable, "-m", stage, str(run.path)], check=True, timeout=RUN_S)
    opened = PreparedRun.open(run.path)
    capture_train_export(opened, RUN_S)
    with opened.open_ledger() as ledger:
        tokens = ledger.capture_rates().tokens
    wall_s, cpu_s = time.perf_counter() - begun, sum(os.times()[2:4]) - before
    return {"tokens": tokens, "wall_s": round(wall_s, 1), "cpu_s": round(cpu_s, 1), "dtype": config.capture_dtype}


def lengths(
    config: RunConfig, target: Path, exports: dict[str, Path], prompts: int
) -> dict[str, dict[str, list[float]]]:
    """Acceptance length of every draft with its 95 % interval, at both temperatures."""
    contestants = load_contestants(target, list(exports.values()), torch.float32)
    tokenizer: PreTrainedTokenizerBase = read_tokenizer(str(target))
    prefix, asked = text_prefix(tokenizer, config.target.add_bos), list[list[int]]()
    for text in documents()[1][:prompts]:
        ids: Any = tokenizer(text[:CHARACTERS], add_special_tokens=False)["input_ids"]
        asked.append([*prefix, *ids[:PROMPT]])
    found: dict[str, dict[str, list[float]]] = {name: {} for name in exports}
    laws = {"1": Sampling(1.0, 1.0).seeded(0, contestants.target.device), "0": GREEDY}
    for temperature, law in laws.items():
        texts = Texts.write(contestants.target, asked, law, ANSWER, contestants.eos_ids)
        readings = texts.read(contestants.target)
        for name, draft in zip(exports, contestants.drafts, strict=True):
            counts = texts.walk(draft, readings, LOOKAHEAD)
            rows = np.array([(each.tokens, each.steps) for each in counts], dtype=np.float64)
            figures = (acceptance_length(counts), *(length_interval(rows) or ()))
            found[name][temperature] = [round(value, 4) for value in figures]
    return found


def compare(name: str, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All seeds of one target."""
    costs: dict[str, Any] = {}
    for seed in options.seeds:
        for way in ("one pass", "two passes"):
            place = folder / f"{way.replace(' ', '-')}-{seed}"
            costs[f"{way}, seed {seed}"] = trained(place, name, options, seed, way == "one pass")
            print(way, seed, costs[f"{way}, seed {seed}"], flush=True)
    exports = {key: folder / key.replace(", seed ", "-").replace(" ", "-") / "export" for key in costs}
    config = load_recipe(Path(__file__).parents[1] / "recipes" / f"{RECIPES[name]}.yaml")
    found = lengths(config, Path(prepare_target(config.target).path), exports, options.prompts)
    result: dict[str, Any] = {"drafts": {key: costs[key] | {"acceptance": found[key]} for key in costs}}
    for temperature in ("1", "0"):
        of = {
            way: [found[f"{way}, seed {seed}"][temperature][0] for seed in options.seeds]
            for way in ("one pass", "two passes")
        }
        means = {way: statistics.fmean(values) for way, values in of.items()}
        spread = statistics.fmean(max(values) - min(values) for values in of.values())
        result[f"temperature {temperature}"] = {
            "one_pass_to_two": round(means["one pass"] / means["two passes"], 4),
            "spread_of_seeds": round(spread / means["two passes"], 4),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args()
    found = json.loads(options.json.read_text()) if options.json.is_file() else {}
    for target in options.targets:
        under = {
            "commit": git_sha(), "date": time.strftime("%Y-%m-%d"), "hardware": hardware(), "cpu": cpu_model(),
            "samples": options.samples, "prompts": options.prompts, "new_tokens": ANSWER, "lookahead": LOOKAHEAD,
        }  # fmt: skip
        with tempfile.TemporaryDirectory(prefix="passes-") as folder:
            found[target] = under | compare(target, options, Path(folder))
        write_atomically(options.json, json.dumps(found, indent=1) + "\n")
        print(json.dumps(found[target], indent=1), flush=True)


if __name__ == "__main__":
    run_main(main)
