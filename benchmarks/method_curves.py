"""How far draft methods get with how much text: acceptance length against training tokens, trained from scratch each.

    python benchmarks/method_curves.py [--target tiny] [--samples 375 750 1500 3000] [--seeds 0] [--methods EAGLE-3 ...]

Text, prompts, drafts and the measurement are those of `methods.py` at temperature 1: real speculative decoding at
lookahead 4, all test prompts together, 95 % intervals by bootstrap over conversations. Each method has one learning
rate, the best of its trials there. Writes benchmarks/results/method-curves-TARGET.json and a Markdown table beside it;
stopped, it goes on with what is missing.
"""

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from draft_step import cpu_model
from methods import (
    KINDS,
    RECIPES,
    RESAMPLES,
    ROOT,
    VALIDATION,
    Cells,
    decode,
    divide,
    drafts,
    prompt_sets,
)  # fmt: skip
from methods_table import RESULTS
from regeneration import train
from sources import add_question_arguments

from infra.files.atomic import write_atomically
from infra.processes.exit import run_main
from infra.provenance import git_sha, versions
from infra.settings import cache_folder
from models.benchmark.bootstrap import length_interval
from models.benchmark.contestants import load_contestants
from models.config.recipe import load_recipe
from models.decoding.acceptance import acceptance_length
from models.dtypes import DTYPES
from models.targets.prepare import prepare_target

RATES = {"EAGLE-3": 1.0, "DFlash": 2.0, "DSpark": 2.0}
"""Learning rates in shares of the recipe's."""


class Curves:
    """One target's trainings."""

    def __init__(self, options: argparse.Namespace):
        self.options, self.recipe = options, ROOT / "recipes" / f"{RECIPES[options.target]}.yaml"
        self.config = load_recipe(self.recipe)
        self.target = prepare_target(self.config.target)
        folder = cache_folder() / "method-curves" / options.target
        folder.mkdir(parents=True, exist_ok=True)
        self.parts = divide(folder)
        sets = prompt_sets(self.config, self.target, self.parts, options)
        self.prompts = [prompt for name, one in sets.items() if name != VALIDATION for prompt in one.tokens]
        self.result = options.results / f"method-curves-{options.target}.json"
        settings = {
            "target": options.target,
            "rates": RATES,
            "learning_rate": self.config.training.learning_rate,
            "drafts": {name: own for name, own in drafts(self.config, self.target).items() if name in RATES},
            "prompts": {one.name: [len(one.tokens), one.dataset_hash] for one in sets.values()},
        }
        self.cells = Cells(self.result.with_suffix(".part.json"), settings)

    def todo(self) -> Iterator[tuple[str, int, int, str]]:
        """Seeds last, so that one whole curve is there soon."""
        for seed, samples, method in product(self.options.seeds, self.options.samples, self.options.methods):
            yield f"{method}, {samples} samples, seed {seed}", seed, samples, method

    def train(self, seed: int, samples: int, method: str, folder: Path) -> dict[str, Any]:
        """A trained draft's tokens and acceptance."""
        options, rate = self.options, self.config.training.learning_rate * RATES[method]
        excluded = [str(self.parts[kind]) for kind in (*KINDS, VALIDATION)]
        excluded += [file for file in (options.gsm8k, options.spec_bench) if file]
        overrides = [
            *drafts(self.config, self.target)[method], f"seed={seed}", f"data.source={self.parts['train']}",
            f"data.exclude={json.dumps(excluded)}", f"data.max_samples={samples}", f"training.learning_rate={rate}",
        ]  # fmt: skip
        trained = train(folder / "run", self.recipe, overrides)
        dtype = DTYPES[self.config.benchmark_dtype]
        loaded = load_contestants(Path(self.target.path), [trained.export], dtype)
        decoded = decode(loaded.target, loaded.drafts[0], self.prompts, 1.0, options, loaded.eos_ids)
        rows = np.array([(each.counts.tokens, each.counts.steps) for each in decoded], dtype=np.float64)
        low, high = length_interval(rows, RESAMPLES, 0)
        length = acceptance_length([each.counts for each in decoded])
        return {"tokens": trained.tokens, "samples": trained.samples, "length": length, "low": low, "high": high}

    def run(self) -> None:
        for name, seed, samples, method in self.todo():
            if name not in self.cells.done:
                begun, folder = time.perf_counter(), Path(tempfile.mkdtemp(prefix="curve-"))
                try:
                    cell = self.train(seed, samples, method, folder)
                finally:
                    shutil.rmtree(folder)
                about = {"method": method, "seed": seed, "asked": samples}
                self.cells.keep(name, cell | about, time.perf_counter() - begun)
        self.write()

    def write(self) -> None:
        about = {"commit": git_sha(), "date": time.strftime("%Y-%m-%d"), "cpu": cpu_model(), "versions": versions()}
        found = {"about": about, "settings": self.cells.settings, "cells": self.cells.done}
        write_atomically(self.result, json.dumps(found, indent=1) + "\n")
        write_atomically(self.result.with_suffix(".md"), table(found))
        self.cells.path.unlink()


def table(found: dict[str, Any]) -> str:
    """A row for each amount of text, a column for each method."""
    cells = list(found["cells"].values())
    methods = list(dict.fromkeys(cell["method"] for cell in cells))
    lines = [
        f"# Draft methods on {found['settings']['target']}: acceptance length against training tokens", "",
        "Temperature 1, lookahead 4, all test prompts of `benchmarks/methods.py`; 95 % intervals over conversations, "
        "a value for each seed. Commit {commit}, {date}, {cpu}.".format(**found["about"]), "",
        "| training tokens | " + " | ".join(methods) + " |", "|---" * (len(methods) + 1) + "|",
    ]  # fmt: skip
    for samples in dict.fromkeys(cell["asked"] for cell in cells):
        here = [cell for cell in cells if cell["asked"] == samples]
        told = [
            ", ".join(f"{c['length']:.2f} ({c['low']:.2f} to {c['high']:.2f})" for c in here if c["method"] == method)
            for method in methods
        ]
        lines.append(f"| {here[0]['tokens']:,} | " + " | ".join(told) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=list(RECIPES), default="tiny")
    parser.add_argument("--samples", type=int, nargs="+", default=[375, 750, 1500, 3000])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--methods", nargs="+", choices=list(RATES), default=list(RATES))
    parser.add_argument("--prompts", type=int, default=24, help="of each set")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="conversations decoded together")
    add_question_arguments(parser)
    parser.add_argument("--results", type=Path, default=RESULTS)
    Curves(parser.parse_args()).run()


if __name__ == "__main__":
    run_main(main)
