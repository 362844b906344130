"""Draft methods side by side: same target, same training tokens, same number of tuning trials, same prompts.

    python benchmarks/methods.py [--targets tiny gemma3-270m] [--samples N] [--rates 0.25 0.5 1 2 4] [--prompts 24]
                                 [--gsm8k FILE] [--spec-bench FILE]

Methods: EAGLE-3, EAGLE-3 with `lk_lambda`, DFlash, DFlash 2, Domino, DSpark with its authors' loss and with DFlash's,
Medusa heads, and two that need no training.
Each trained one gets the same captured samples once, in the same order, and one trial for every learning rate (the
recipe's times each of `--rates`); the trial that accepts most on the validation prompts at temperature 1 is in the
table, and all trials are written down.

The text is divided by a rule fixed before anything was measured. Python's documentation has three kinds of documents:
`topics` (the language reference, all of them test, so no draft has seen the kind), `packages` (docstrings of modules
inside packages) and `modules` (of all other modules). A document of these two goes by the first byte of the SHA-256
of its place modulo 10: 0 is test, 1 validation, all others are trained on. A prompt is the beginning of a document, and
a set's prompts are the first ones in the order of these hashes. Training documents that hold a test prompt, exactly or
nearly, are left out. Where files of GSM8K and Spec-Bench are given (or named by DRAFTSMITH_GSM8K and
DRAFTSMITH_SPEC_BENCH), their questions are two sets more, in the files' order, spread evenly over categories. They are
continued as plain text, as these targets were trained.

Figures are of the walk over the target's own text, at temperature 1 (the main one; a draft draws its proposals) and
greedy, which equals real speculative decoding, with 95 % intervals by jackknife over conversations. Text of the target
with a distinct-token share under 0.3 is shown apart: whatever copies wins there. Writes
benchmarks/results/methods-TARGET.json and a Markdown table beside it. Stopped, it goes on with the trials that are
missing.
"""

import argparse
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from machine import cpu_model
from methods_table import RESULTS, write_result
from offline import Texts, averaged, capture, of_layers, train
from prepared import prepared_run
from sources import add_question_arguments, question_sets

from infra.files.atomic import write_atomically
from infra.processes.exit import run_main
from infra.provenance import git_sha, versions
from infra.records.data_path import TargetRecord
from models.benchmark.paired import length_interval
from models.config.recipe import RunConfig, load_recipe
from models.data import python_docs
from models.data.conversations import source_hash
from models.data.prompts import read_prompts
from models.decoding.acceptance import acceptance_length, distinct_token_share
from models.decoding.prompt_lookup import PromptLookup
from models.decoding.simulated import TextReading
from models.decoding.token_recycling import TokenRecycling
from models.drafts.base import PackedSamples
from models.drafts.batched_proposer import ProposalSource
from models.drafts.sampling import GREEDY, Sampling
from models.dtypes import DTYPES
from models.run import PreparedRun
from models.targets.model import TargetModel, eos_ids
from models.targets.prepare import prepare_target
from models.targets.tiny import one_thread

ROOT = Path(__file__).parents[1]
RECIPES = {"tiny": "tiny", "gemma3-270m": "quickstart"}
KINDS = ("topics", "packages", "modules")
VALIDATION = "validation"
PROMPT_CHARACTERS = 800
"""Of a document, more than any prompt takes."""
LOOKAHEAD = 4
TEMPERATURES = (1.0, 0.0)
BASELINES: dict[str, type[PromptLookup] | type[TokenRecycling]] = {
    "prompt lookup": PromptLookup,
    "Token Recycling": TokenRecycling,
}
CANDIDATES = 8
Readings = Mapping[tuple[str, float], list[TextReading]]
"""By set of prompts and temperature."""
Walks = dict[str, dict[str, dict[str, float]]]
"""Acceptance length with its interval, by set and temperature."""


@dataclass(frozen=True)
class PromptSet:
    """Prompts that all methods continue."""

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
        found[name] = PromptSet(tokens, source_hash(str(parts[name])))
    for name, suite in question_sets(options, target, config.target.add_bos).items():
        found[name] = PromptSet(suite.prompts, suite.dataset_hash)
    return found


def drafts(config: RunConfig, target: TargetRecord) -> dict[str, list[str]]:
    """The overrides that make each method of a recipe for EAGLE-3, of about the same size."""
    eagle = config.draft.model_dump(mode="json")
    shared = ("num_heads", "num_kv_heads", "head_dim", "intermediate_size", "fc_norm", "vocab_size")
    shared += ("rope_theta", "rope_scaling")
    dflash = {"method": "dflash", "block_size": 8, "decay_gamma": 4.0} | {name: eagle[name] for name in shared}
    dflash["layer_types"] = ["full_attention"] * 2
    dspark = dflash | {"method": "dspark", "block_size": 7, "markov_rank": 64}
    divergence = {"cross_entropy_weight": 0.0, "tv_weight": 0.0, "kl_weight": 1.0}
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
        "DSpark, KL": [f"draft={json.dumps(dspark | divergence)}"],
        # Its heads stand on the target's last layer.
        "Medusa": [f"draft={json.dumps(medusa)}", f"target.aux_layer_ids=[{target.num_layers - 1}]"],
    }


class Ground:
    """One target, its text and its prompts; what a trained draft accepts of them."""

    def __init__(self, name: str, samples: int | None, options: argparse.Namespace, folder: Path):
        self.name, self.options, self.folder = name, options, folder
        self.recipe = ROOT / "recipes" / f"{RECIPES[name]}.yaml"
        self.config = load_recipe(self.recipe)
        self.samples = samples or self.config.data.max_samples
        self.record = prepare_target(self.config.target)
        self.dtype = DTYPES[self.config.benchmark_dtype]
        self.parts = divide(folder)
        self.sets = prompt_sets(self.config, self.record, self.parts, options)
        self.drafts = drafts(self.config, self.record)
        # Those that any draft reads: texts and samples are read once.
        self.layers = tuple(sorted({*self.config.target.aux_layer_ids, self.record.num_layers - 1}))
        self.target = TargetModel.load(Path(self.record.path), self.layers, self.dtype)
        self.texts = self._texts()
        self.readings = {key: texts.read(self.target) for key, texts in self.texts.items()}
        self._batches: list[PackedSamples] = []

    def settings(self) -> dict[str, Any]:
        """What two trainings must share to be compared."""
        return {
            "target": self.name,
            "recipe": self.recipe.stem,
            "samples": self.samples,
            "optimizer": self.config.training.optimizer,
            "learning_rate": self.config.training.learning_rate,
            "dtypes": {"training": self.config.training_dtype, "walks": self.config.benchmark_dtype},
            "lookahead": LOOKAHEAD,
            "max_new_tokens": self.options.max_new_tokens,
            "prompts": {name: [len(one.tokens), one.dataset_hash] for name, one in self.sets.items()},
            "drafts": self.drafts,
        }

    def _texts(self) -> dict[tuple[str, float], Texts]:
        target, ends = self.target, eos_ids(Path(self.record.path))
        most, found = self.options.max_new_tokens, {}
        for (name, one), temperature in ((pair, heat) for pair in self.sets.items() for heat in TEMPERATURES):
            law = Sampling(temperature, 1.0).seeded(0, target.device) if temperature else GREEDY
            found[name, temperature] = Texts.write(target, one.tokens, law, most, ends)
        return found

    @contextmanager
    def run(self, method: str, *overrides: str) -> Iterator[PreparedRun]:
        """A run's settings and samples."""
        files = [str(self.parts[kind]) for kind in (*KINDS, VALIDATION)]
        files += [file for file in (self.options.gsm8k, self.options.spec_bench) if file]
        data = [f"data.source={self.parts['train']}", f"data.exclude={json.dumps(files)}"]
        data += [f"data.max_samples={self.samples}", "benchmark.max_lookahead=7"]
        with (
            TemporaryDirectory(dir=self.folder) as place,
            prepared_run(Path(place) / "run", self.recipe, [*self.drafts[method], *data, *overrides]) as run,
        ):
            yield run

    def batches(self, run: PreparedRun, steps: int | None) -> list[PackedSamples]:
        """Captured samples of the first optimizer steps, with the layers that the run's draft reads."""
        self._batches = self._batches or capture(run, self.target)
        wanted = run.config.target.aux_layer_ids
        return [replace(one, aux=of_layers(one.aux, self.layers, wanted)) for one in self._batches[:steps]]

    def trial(self, method: str, rate: float, samples: int | None = None, seed: int = 0) -> dict[str, Any]:
        """Train a draft on the first `samples` samples, and walk over all texts."""
        begun = time.perf_counter()
        with self.run(method, f"seed={seed}") as run:
            per_step, settings = run.config.training.samples_per_step, run.config.training
            batches = self.batches(run, samples and -(-samples // per_step))
            settings = settings.model_copy(update={"learning_rate": settings.learning_rate * rate})
            module, cpu_s = train(run, batches, settings)
            trained = sum(parameter.numel() for parameter in module.draft.parameters())
            with averaged(module, self.dtype) as draft:
                walks = self.walks(draft, self.readings, run.config.target.aux_layer_ids)
        return {
            "tokens": sum(len(batch.tokens) for batch in batches),
            "steps": len(batches),
            "parameters": trained,
            "cpu_s": round(cpu_s, 1),
            "wall_s": round(time.perf_counter() - begun, 1),
            "walks": walks,
        }

    def baseline_walks(self) -> dict[str, dict[str, Any]]:
        """Acceptance of what needs no training."""
        readings = {key: texts.read(self.target, CANDIDATES) for key, texts in self.texts.items()}
        return {name: {"walks": self.walks(source(), readings, self.layers)} for name, source in BASELINES.items()}

    def walks(self, source: ProposalSource, readings: Readings, layers: Sequence[int]) -> Walks:
        """Acceptance by set and temperature of a source that reads these layers."""
        found: Walks = {}
        for (name, temperature), texts in self.texts.items():
            read = readings[name, temperature]
            wanted = [replace(one, aux=of_layers(one.aux, self.layers, layers)) for one in read]
            counts = texts.walk(source, wanted, LOOKAHEAD)
            rows = np.array([(each.tokens, each.steps) for each in counts], dtype=np.float64)
            interval = length_interval(rows)
            assert interval is not None, "every set has several prompts"
            figures = {"length": acceptance_length(counts), "low": interval[0], "high": interval[1]}
            found.setdefault(name, {})[f"{temperature:g}"] = {key: round(value, 4) for key, value in figures.items()}
        return found

    def about(self) -> dict[str, Any]:
        """Where and when."""
        shares = {f"{name} {heat:g}": distinct_token_share(texts.texts) for (name, heat), texts in self.texts.items()}
        under = {"commit": git_sha(), "date": time.strftime("%Y-%m-%d"), "cpu": cpu_model(), "versions": versions()}
        return under | {"interval": "jackknife", "seed": self.config.seed, "distinct_token_shares": shares}


def compare(name: str, options: argparse.Namespace, folder: Path) -> None:
    """One target from beginning to end."""
    ground, result = Ground(name, options.samples, options, folder), options.results / f"methods-{name}.json"
    cells = Cells(result.with_suffix(".part.json"), ground.settings() | {"rates": options.rates})
    if not BASELINES.keys() <= cells.done.keys():
        begun = time.perf_counter()
        for baseline, cell in ground.baseline_walks().items():
            cells.keep(baseline, cell, time.perf_counter() - begun)
    for method in ground.drafts:
        for rate in options.rates:
            if (cell := f"{method} {rate:g}") not in cells.done:
                begun = time.perf_counter()
                cells.keep(cell, ground.trial(method, rate), time.perf_counter() - begun)
    write_result(result, ground.about() | cells.settings, list(ground.drafts), list(BASELINES), cells.done)
    cells.path.unlink()
    print(result.with_suffix(".md").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--samples", type=int, help="trained on; default: the recipe's data.max_samples")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.25, 0.5, 1.0, 2.0, 4.0])
    add_walk_arguments(parser)
    options = parser.parse_args()
    with one_thread(), TemporaryDirectory(prefix="methods-") as folder:
        for name in options.targets:
            compare(name, options, Path(folder))


def add_walk_arguments(parser: argparse.ArgumentParser) -> None:
    """What drafts are measured on."""
    parser.add_argument("--prompts", type=int, default=24, help="of each set")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    add_question_arguments(parser)
    parser.add_argument("--results", type=Path, default=RESULTS)


if __name__ == "__main__":
    run_main(main)
