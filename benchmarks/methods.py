"""Draft methods side by side: same target, same training tokens, same number of tuning trials, same prompts.

    python benchmarks/methods.py [--targets tiny gemma3-270m] [--samples N] [--rates 0.25 0.5 1 2] [--prompts 24]
                                 [--gsm8k FILE] [--spec-bench FILE]

Methods: EAGLE-3, EAGLE-3 with `lk_lambda`, DFlash, DFlash 2, Domino, DSpark, Medusa heads, and two that need
no training.
Each trained one gets the same samples once, in the same order, and one trial for every learning rate (the recipe's
times each of `--rates`); the trial that accepts most on the validation prompts at temperature 1 is measured on the
test prompts, and all trials are written down.

The text is divided by a rule fixed before anything was measured. Python's documentation has three kinds of documents:
`topics` (the language reference, all of them test, so no draft has seen the kind), `packages` (docstrings of modules
inside packages) and `modules` (of all other modules). A document of these two goes by the first byte of the SHA-256
of its place modulo 10: 0 is test, 1 validation, all others are trained on. A prompt is the beginning of a document, and
a set's prompts are the first ones in the order of these hashes. Training documents that hold a test prompt, exactly or
nearly, are left out. Where files of GSM8K and Spec-Bench are given (or named by DRAFTSMITH_GSM8K and
DRAFTSMITH_SPEC_BENCH), their questions are two sets more, in the files' order, spread evenly over categories. They are
continued as plain text, as these targets were trained.

Figures are of real speculative decoding by the reference decoder, at temperature 1 (the main one; a draft samples its
proposals) and greedy, with 95 % intervals by bootstrap over conversations. Text of the target with a distinct-token
share under 0.3 is shown apart: whatever copies wins there. Writes benchmarks/results/methods-TARGET.json and a
Markdown table beside it. Stopped, it goes on with the cells that are missing.
"""

import argparse
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from methods_table import RESULTS, write_result
from regeneration import train
from rich.console import Console
from rich.progress import track
from sources import add_question_arguments, question_sets

from infra.files.atomic import write_atomically
from infra.processes.exit import run_main
from infra.provenance import git_sha
from infra.records.data_path import TargetRecord
from infra.settings import cache_folder
from models.benchmark.bootstrap import length_interval
from models.benchmark.conditions import Counter, conditions
from models.benchmark.contestants import load_contestants
from models.config.recipe import RunConfig, load_recipe
from models.data import python_docs
from models.data.conversations import source_hash
from models.data.prompts import read_prompts
from models.decoding.acceptance import acceptance_length, distinct_token_share
from models.decoding.prompt_lookup import PromptLookup
from models.decoding.speculative import Decoded, speculate_together
from models.decoding.token_recycling import TokenRecycling
from models.drafts.batched_proposer import ProposalSource
from models.drafts.sampling import GREEDY, Sampling
from models.dtypes import DTYPES
from models.targets.model import TargetModel
from models.targets.prepare import prepare_target

ROOT = Path(__file__).parents[1]
RECIPES = {"tiny": "tiny", "gemma3-270m": "quickstart"}
KINDS = ("topics", "packages", "modules")
VALIDATION = "validation"
PROMPT_CHARACTERS = 800
"""Of a document, more than any prompt takes."""
LOOKAHEAD = 4
TEMPERATURES = (1.0, 0.0)
TRAINED = ("EAGLE-3", "EAGLE-3 + LK", "DFlash", "DFlash 2", "Domino", "DSpark", "Medusa")
BASELINES: dict[str, type[PromptLookup] | type[TokenRecycling]] = {
    "prompt lookup": PromptLookup,
    "Token Recycling": TokenRecycling,
}
RESAMPLES = 10_000


@dataclass(frozen=True)
class PromptSet:
    """Prompts that all methods continue."""

    name: str
    tokens: list[list[int]]
    dataset_hash: str


class Cells:
    """What is done, kept in a file beside the result; cells of other settings are never taken for these."""

    def __init__(self, path: Path, settings: dict[str, Any]):
        self.path, self.settings = path, json.loads(json.dumps(settings))
        self.done: dict[str, Any] = {}
        if path.is_file():
            found = json.loads(path.read_text())
            if found["settings"] != self.settings:
                raise ValueError(f"{path} was begun with other settings ({found['settings']}): go on with them, or "
                                 "remove the file")  # fmt: skip
            self.done = found["cells"]

    def keep(self, name: str, cell: Any, seconds: float) -> None:
        self.done[name] = cell | {"seconds": round(seconds, 1)}
        write_atomically(self.path, json.dumps({"settings": self.settings, "cells": self.done}))
        print(f"{name}: {seconds:.0f} s", flush=True)


def divide(folder: Path) -> dict[str, Path]:
    """The parts of the documentation by the module's rule: `train`, `validation` and the kinds of test documents."""
    parts: dict[str, list[tuple[str, str]]] = {name: [] for name in ("train", VALIDATION, *KINDS)}
    for place, text in python_docs.documents():
        digest = hashlib.sha256(place.encode()).hexdigest()
        kind, share = _kind(place), int(digest[:2], 16) % 10
        part = kind if share == 0 or kind == "topics" else VALIDATION if share == 1 else "train"
        parts[part].append((digest, text))
    for name, documents in parts.items():
        texts = [text if name == "train" else text[:PROMPT_CHARACTERS] for _, text in sorted(documents)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return {name: folder / f"{name}.jsonl" for name in parts}


def _kind(place: str) -> str:
    if place.startswith("topic "):
        return "topics"
    return "packages" if "." in place else "modules"


def prompt_sets(
    config: RunConfig, target: TargetRecord, parts: dict[str, Path], options: argparse.Namespace
) -> dict[str, PromptSet]:
    """The validation prompts and all test sets."""
    settings = config.benchmark.model_copy(update={"prompts": options.prompts})
    found: dict[str, PromptSet] = {}
    for name in (VALIDATION, *KINDS):
        tokens, _ = read_prompts(str(parts[name]), target, settings, "none", config.target.add_bos)
        found[name] = PromptSet(name, tokens, source_hash(str(parts[name])))
    for name, suite in question_sets(options, target, config.target.add_bos).items():
        found[name] = PromptSet(name, suite.prompts, suite.dataset_hash)
    return found


def drafts(config: RunConfig, target: TargetRecord) -> dict[str, list[str]]:
    """The overrides that make each method of a recipe for EAGLE-3, of about the same size."""
    eagle = config.draft.model_dump(mode="json")
    shape = {key: eagle[key] for key in ("num_heads", "num_kv_heads", "head_dim", "intermediate_size", "fc_norm")}
    dflash = {"method": "dflash", "block_size": 8, "decay_gamma": 4.0} | shape
    dflash["layer_types"] = ["full_attention"] * 2
    dspark = dflash | {"method": "dspark", "block_size": 7, "markov_rank": 64}
    domino = dflash | {"method": "domino", "gru_hidden_dim": 64, "emb_dim": 64}
    second = dflash | {"method": "dflash2", "selector_rank": 64}
    medusa = {"method": "medusa", "heads": LOOKAHEAD, "vocab_size": eagle["vocab_size"]}
    return {
        "EAGLE-3": [],
        "EAGLE-3 + LK": ["draft.loss=lk_lambda"],
        "DFlash": [f"draft={json.dumps(dflash)}"],
        "DFlash 2": [f"draft={json.dumps(second)}"],
        "Domino": [f"draft={json.dumps(domino)}"],
        "DSpark": [f"draft={json.dumps(dspark)}"],
        # Its heads stand on the target's last layer.
        "Medusa": [f"draft={json.dumps(medusa)}", f"target.aux_layer_ids=[{target.num_layers - 1}]"],
    }


@dataclass(frozen=True)
class Comparison:
    """One target with its text, prompts and what is done."""

    recipe: Path
    config: RunConfig
    target: TargetRecord
    parts: dict[str, Path]
    sets: dict[str, PromptSet]
    cells: Cells
    folder: Path
    options: argparse.Namespace

    def export(self, method: str, rate: float) -> Path:
        return self.folder / f"{method.lower().replace(' ', '')}-{rate:g}"

    def tests(self) -> Iterator[PromptSet]:
        yield from (one for name, one in self.sets.items() if name != VALIDATION)


def train_all(comparison: Comparison) -> None:
    """One draft for each method and learning rate."""
    config, test = comparison.config, [str(comparison.parts[kind]) for kind in KINDS]
    questions = [file for file in (comparison.options.gsm8k, comparison.options.spec_bench) if file]
    for method, own in drafts(config, comparison.target).items():
        for share in comparison.options.rates:
            name = f"train {method} {share:g}"
            if name in comparison.cells.done:
                continue
            begun, export = time.perf_counter(), comparison.export(method, share)
            run = comparison.folder / f"methods-{os.getpid()}"
            shutil.rmtree(run, ignore_errors=True)
            overrides = [
                *own, f"data.source={comparison.parts['train']}", f"data.exclude={json.dumps([*test, *questions])}",
                f"data.max_samples={comparison.options.samples or config.data.max_samples}",
                f"training.learning_rate={config.training.learning_rate * share}",
            ]  # fmt: skip
            trained = train(run, comparison.recipe, overrides)
            shutil.rmtree(export, ignore_errors=True)
            trained.export.rename(export)
            shutil.rmtree(run)
            cell = {"tokens": trained.tokens, "steps": trained.steps, "samples": trained.samples}
            weights = (export / "model.safetensors").stat().st_size
            comparison.cells.keep(name, cell | {"export_bytes": weights}, time.perf_counter() - begun)


def choose(comparison: Comparison) -> dict[str, float]:
    """By method, the learning rate that accepts most on the validation prompts at temperature 1."""
    shares = [float(share) for share in comparison.options.rates]
    for method in TRAINED:
        for share in shares:
            name = f"validate {method} {share:g}"
            if name not in comparison.cells.done:
                measure(comparison, name, comparison.export(method, share), None, comparison.sets[VALIDATION], 1.0)
    done = comparison.cells.done
    return {method: max(shares, key=lambda share: done[f"validate {method} {share:g}"]["length"]) for method in TRAINED}


def measure_all(comparison: Comparison, chosen: dict[str, float]) -> None:
    """Every method on every test set at every temperature."""
    todo = [
        (f"test {method} {prompts.name} {temperature:g}", method, prompts, temperature)
        for prompts in comparison.tests()
        for temperature in TEMPERATURES
        for method in (*TRAINED, *BASELINES)
    ]
    missing = [cell for cell in todo if cell[0] not in comparison.cells.done]
    for name, method, prompts, temperature in track(missing, "decoding", console=Console(stderr=True), transient=True):
        export = comparison.export(method, chosen[method]) if method in chosen else None
        measure(comparison, name, export, BASELINES.get(method), prompts, temperature)


def measure(
    comparison: Comparison,
    name: str,
    export: Path | None,
    baseline: type[PromptLookup] | type[TokenRecycling] | None,
    prompts: PromptSet,
    temperature: float,
) -> None:
    """Decode one set of prompts with one source of proposals, and keep its figures."""
    begun, settings = time.perf_counter(), comparison.config.benchmark
    folders = [export] if export else []
    loaded = load_contestants(Path(comparison.target.path), folders, DTYPES[comparison.config.benchmark_dtype])
    assert (baseline is None) == bool(folders)
    source: ProposalSource = baseline() if baseline else loaded.drafts[0]
    decoded = decode(loaded.target, source, prompts.tokens, temperature, comparison.options, loaded.eos_ids)
    rows = np.array([(each.counts.tokens, each.counts.steps) for each in decoded], dtype=np.float64)
    low, high = length_interval(rows, RESAMPLES, 0)
    under = conditions(
        settings, Counter.reference(loaded.target), target=comparison.target, draft=export,
        dataset_hash=prompts.dataset_hash, template_hash="none", prompts=len(prompts.tokens),
    )  # fmt: skip
    told = under.model_copy(
        update={
            "temperature": temperature, "lookahead": LOOKAHEAD, "concurrency": comparison.options.batch,
            "max_new_tokens": comparison.options.max_new_tokens,
        }
    )  # fmt: skip
    cell = {
        "length": acceptance_length([each.counts for each in decoded]),
        "low": low,
        "high": high,
        "steps": int(rows[:, 1].sum()),
        "conversations": len(rows),
        "distinct_token_share": distinct_token_share([each.tokens for each in decoded]),
        "conditions": told.model_dump(mode="json"),
    }
    comparison.cells.keep(name, cell, time.perf_counter() - begun)


def decode(
    target: TargetModel,
    source: ProposalSource,
    prompts: Sequence[list[int]],
    temperature: float,
    options: argparse.Namespace,
    eos_ids: frozenset[int],
) -> list[Decoded]:
    """All prompts in batches; the seed determines the draws."""
    generator = torch.Generator(target.device).manual_seed(0)
    sampling = Sampling(temperature, 1.0, generator) if temperature else GREEDY
    found: list[Decoded] = []
    for first in range(0, len(prompts), options.batch):
        some = prompts[first : first + options.batch]
        found += speculate_together(target, source, some, LOOKAHEAD, options.max_new_tokens, eos_ids, sampling=sampling)
    return found


def compare(name: str, options: argparse.Namespace) -> None:
    """One target from beginning to end."""
    recipe = ROOT / "recipes" / f"{RECIPES[name]}.yaml"
    config, result = load_recipe(recipe), options.results / f"methods-{name}.json"
    target = prepare_target(config.target)
    folder = cache_folder() / "methods" / name
    folder.mkdir(parents=True, exist_ok=True)
    parts = divide(folder)
    sets = prompt_sets(config, target, parts, options)
    settings = {
        "target": name,
        "recipe": recipe.stem,
        "samples": options.samples or config.data.max_samples,
        "learning_rate": config.training.learning_rate,
        "rates": options.rates,
        "max_new_tokens": options.max_new_tokens,
        "prompts": {one.name: [len(one.tokens), one.dataset_hash] for one in sets.values()},
        "drafts": drafts(config, target),
    }
    cells = Cells(result.with_suffix(".part.json"), settings)
    comparison = Comparison(recipe, config, target, parts, sets, cells, folder, options)
    train_all(comparison)
    chosen = choose(comparison)
    measure_all(comparison, chosen)
    about = {"commit": git_sha(), "date": time.strftime("%Y-%m-%d"), "seed": config.seed}
    write_result(result, about | settings, chosen, cells.done)
    cells.path.unlink()
    shutil.rmtree(folder)
    print(result.with_suffix(".md").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--samples", type=int, help="trained on; default: the recipe's data.max_samples")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.25, 0.5, 1.0, 2.0], help="at most 4")
    parser.add_argument("--prompts", type=int, default=24, help="of each set")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8, help="conversations decoded together")
    add_question_arguments(parser)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    if not 1 <= len(set(options.rates)) == len(options.rates) <= 4:
        raise ValueError("--rates: one to four different shares of the recipe's learning rate")
    for name in options.targets:
        compare(name, options)


if __name__ == "__main__":
    run_main(main)
