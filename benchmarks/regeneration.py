"""What on-policy text gives: the same budget of training tokens, on given text and on the target's own.

    python benchmarks/regeneration.py [--recipe recipes/quickstart.yaml] [--documents 1000] [--tokens 175000]
                                      [--seeds 0 1 2] [section.field=value ...]
    python benchmarks/regeneration.py --speed --documents 64 [--recipe FILE] [section.field=value ...]

The recipe's text is divided first, by a rule: of all documents in the order of their hashes, the last ones give the
prompts of the comparison, the first ones are trained on, once as they are and once as the target goes on after their
first tokens (`data.regeneration`, here at temperature 1, as the main figure is measured). Training documents that hold
one of the prompts are left out of both. Both drafts take the same number of tokens, in order of hash, up to one sample;
recipe, seed, draft and longest sample are the same. The comparison is the simulated walk over the same texts of the
target, greedy and sampled, with a paired bootstrap over conversations; what regeneration costs is written beside it.

`--speed` trains nothing: it regenerates the documents with both engines, one after the other, and counts tokens per
second, without the engine's start.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prepared import capture_train_export, prepared_run

from infra.files.atomic import write_atomically
from infra.files.run_folder import RunFolder
from infra.processes.exit import run_main
from infra.provenance import git_sha, hardware, versions
from infra.records.data_path import RegeneratedRecord, TrainingResult
from models.benchmark.conditions import Counter, conditions, sampled_law
from models.benchmark.contestants import Contestants, load_contestants
from models.benchmark.paired import paired_difference
from models.config.recipe import RunConfig, load_recipe
from models.data.conversations import Document, read_documents, source_hash
from models.data.dialogue import Dialogue
from models.data.prepare import prepare_samples
from models.data.prompts import read_prompts
from models.data.sample_set import SampleSet
from models.decoding.acceptance import AcceptedCounts, summarise
from models.decoding.continuations import continue_batch
from models.decoding.simulated import features, simulate
from models.drafts.batched_proposer import RolloutSource
from models.drafts.sampling import GREEDY, Sampling
from models.dtypes import DTYPES
from models.regeneration.engines import start_text_engine
from models.regeneration.regenerate import regenerate
from models.run import RunWithTarget
from models.targets.prepare import prepare_target

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "benchmarks" / "results" / "regeneration.json"
SPEED_RESULT = RESULT.with_name("regeneration_speed.json")
GIVEN, REGENERATED = "given text", "regenerated text"
PROMPTS = 96
"""Documents that give prompts: more than are asked for, because some are too short."""
RUN_S = 4 * 3600
REGENERATION = "data.regeneration={temperature: 1.0, prompt_tokens: 32, max_new_tokens: 224}"

Walk = list[tuple[AcceptedCounts, ...]]


@dataclass(frozen=True)
class Trained:
    """One draft, and what it was trained on."""

    export: Path
    samples: int
    steps: int
    tokens: int
    wall_s: float
    coverage: float | None


def divide(config: RunConfig, documents: int, folder: Path) -> tuple[Path, Path]:
    """Files of training text and of prompts; no document is in both."""
    by_hash = {document.content_hash: document for document in read_documents(config.data.source)}
    ordered = [by_hash[key] for key in sorted(by_hash)]
    parts = {"train.jsonl": ordered[:-PROMPTS][:documents], "prompts.jsonl": ordered[-PROMPTS:]}
    for name, part in parts.items():
        (folder / name).write_text("".join(json.dumps(_record(document)) + "\n" for document in part))
    return folder / "train.jsonl", folder / "prompts.jsonl"


def _record(document: Document) -> dict[str, Any]:
    if document.plain:
        return {"text": document.text}
    return {"messages": [message.as_dict() for message in document.messages], "tools": list(document.tools)}


def regenerated(folder: Path, config: RunConfig) -> RegeneratedRecord:
    """The target's own text, from the cache if it is there."""
    run = RunFolder(folder / "regenerate")
    target = prepare_target(config.target)
    write_atomically(run.config, config)
    write_atomically(run.target, target)
    return regenerate(RunWithTarget(run, config, target))


def samples_within(config: RunConfig, tokens: int) -> int:
    """How many training samples, in order of hash, hold `tokens` tokens. Raises ValueError where all hold fewer."""
    record = prepare_samples(config.data, prepare_target(config.target), config.target.add_bos)
    whole = SampleSet.open(Path(record.path), "train").lengths.cumsum(0)
    if int(whole[-1]) < tokens:
        raise ValueError(
            f"{config.data.source} gives {int(whole[-1])} tokens, fewer than --tokens {tokens}: lower it, or raise "
            "--documents or the length of regenerated answers"
        )
    return int((whole <= tokens).sum())


def train(folder: Path, recipe: Path, overrides: list[str]) -> Trained:
    """Capture, train and export. Raises ValueError when a process fails."""
    begun = time.perf_counter()
    with prepared_run(folder, recipe, overrides) as run:
        capture_train_export(run, RUN_S)
        result: TrainingResult = TrainingResult.read(run.folder.training)
        wall_s = time.perf_counter() - begun
        return Trained(
            run.folder.export, run.samples.train_samples, result.steps, result.tokens, wall_s, result.token_coverage
        )


def walks(
    contestants: Contestants, config: RunConfig, prompts: Sequence[Sequence[int]], sampling: Sampling
) -> tuple[list[list[int]], Walk, Walk]:
    """The target's texts, and both drafts' walks over them."""
    settings, target = config.benchmark, contestants.target
    texts = continue_batch(
        target, prompts, settings.max_new_tokens, contestants.eos_ids,
        replace(sampling, generator=torch.Generator(target.device).manual_seed(config.seed)),
        batch_size=settings.batch_size,
    )  # fmt: skip
    assert contestants.champion is not None
    sources: list[RolloutSource] = [contestants.draft, contestants.champion]
    found: list[Walk] = [[], []]
    for prompt, text in zip(prompts, texts, strict=True):
        aux = features(target, [*prompt, *text])
        for walk, source in zip(found, sources, strict=True):
            ends = contestants.eos_ids
            walk.append(simulate(source, prompt, text, aux, settings.max_lookahead, eos_ids=ends))
    return texts, found[0], found[1]


def compare(ours: Walk, given: Walk, config: RunConfig) -> dict[str, Any]:
    """Acceptance lengths of both, and the relative difference with its lower bound."""
    at = config.benchmark.lookahead
    sums = [
        np.array([(of[at - 1].tokens, of[at - 1].steps) for of in walk], dtype=np.float64) for walk in (ours, given)
    ]
    difference = paired_difference(sums[0], sums[1])
    return {
        REGENERATED: summarise(ours).model_dump(mode="json"),
        GIVEN: summarise(given).model_dump(mode="json"),
        "difference": round(difference.estimate, 4),
        "lower_bound_97.5": round(difference.lower_bound, 4),
    }


def measure(trained: dict[str, Trained], config: RunConfig, prompts: Path) -> dict[str, Any]:
    """Both drafts on the same texts, with the conditions."""
    settings, target = config.benchmark, prepare_target(config.target)
    template = config.data.chat_template
    tokens, template_hash = read_prompts(str(prompts), target, settings, template, config.target.add_bos)
    contestants = load_contestants(
        Path(target.path), [trained[REGENERATED].export, trained[GIVEN].export], DTYPES[config.benchmark_dtype]
    )
    greedy, *greedy_walks = walks(contestants, config, tokens, GREEDY)
    _, *sampled_walks = walks(contestants, config, tokens, sampled_law(settings, contestants.recommended))
    under = conditions(
        settings, Counter.reference(contestants.target), target=target, draft=trained[REGENERATED].export,
        dataset_hash=source_hash(str(prompts)), template_hash=template_hash, prompts=len(tokens),
        texts=zip(tokens, greedy, strict=True),
    )  # fmt: skip
    return {
        "sampled": compare(sampled_walks[0], sampled_walks[1], config),
        "greedy": compare(greedy_walks[0], greedy_walks[1], config),
        "conditions": under.model_dump(mode="json"),
    }


def speed(folder: Path, recipe: Path, overrides: list[str]) -> dict[str, Any]:
    """Tokens per second of both engines on the same documents."""
    found = {}
    for engine in ("transformers", "sglang"):
        config = load_recipe(recipe, [*overrides, f"generator.engine={engine}"])
        run = RunWithTarget(RunFolder(folder / engine), config, prepare_target(config.target))
        dialogues = [Dialogue(document) for document in read_documents(config.data.source)]
        with closing(start_text_engine(run, folder)) as started:
            begun = time.perf_counter()
            tokens = sum(dialogue.tokens for dialogue in started.finished(iter(dialogues)))
            seconds = time.perf_counter() - begun
        found[engine] = {"tokens": tokens, "seconds": round(seconds, 1), "tokens_per_s": round(tokens / seconds, 1)}
        print(engine, found[engine], flush=True)
    return found


def longest(config: RunConfig) -> int:
    """Given text is cut to the length of the target's own: an optimizer step sees as much of either."""
    settings, templated = config.data.regeneration, config.data.chat_template == "tokenizer"
    assert settings is not None
    own = settings.prompt_tokens + settings.max_new_tokens + 1
    return config.data.max_tokens if templated else min(config.data.max_tokens, own)


def one_seed(base: Path, options: argparse.Namespace, seed: int, sources: dict[str, str], prompts: Path) -> Any:
    """Both drafts of one seed, trained and measured."""
    trained, told = dict[str, Trained](), dict[str, Any]()
    shared = [
        *options.overrides, f"seed={seed}", f"data.exclude=[{prompts}]", "data.regeneration=null",
        f"data.max_tokens={longest(load_recipe(options.recipe, [*options.overrides, options.regeneration]))}",
    ]  # fmt: skip
    for way, source in sources.items():
        overrides = [*shared, f"data.source={source}", "data.max_samples=null"]
        most = samples_within(load_recipe(options.recipe, overrides), options.tokens)
        folder = base / f"{way.replace(' ', '-')}-{seed}"
        trained[way] = train(folder, options.recipe, [*overrides, f"data.max_samples={most}"])
        found = trained[way]
        told[way] = {
            "samples": found.samples, "steps": found.steps, "tokens": found.tokens, "wall_s": round(found.wall_s, 1),
            "vocabulary_holds_of_its_tokens": found.coverage,
        }  # fmt: skip
    return {"seed": seed, "trained": told, **measure(trained, load_recipe(options.recipe, shared), prompts)}


def conditions_of(options: argparse.Namespace) -> dict[str, Any]:
    """What every result says of itself."""
    return {
        "commit": git_sha(),
        "date": time.strftime("%Y-%m-%d"),
        "recipe": options.recipe.stem,
        "overrides": options.overrides,
        "documents": options.documents,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "quickstart.yaml")
    parser.add_argument("--documents", type=int, default=1000, help="documents to train on, and to regenerate")
    parser.add_argument("--tokens", type=int, default=175_000, help="training tokens of each draft")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--regeneration", default=REGENERATION, help="the override that says how")
    parser.add_argument("--speed", action="store_true", help="only compare the engines")
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="draftsmith-regeneration-") as name:
        base = Path(name)
        text, prompts = divide(load_recipe(options.recipe, options.overrides), options.documents, base)
        source = f"data.source={text}"
        if options.speed:
            figures = speed(base, options.recipe, [*options.overrides, source, options.regeneration])
            result = conditions_of(options) | {"hardware": hardware(), "versions": versions(), "engines": figures}
            write_atomically(options.json or SPEED_RESULT, json.dumps(result, indent=1) + "\n")
            return
        record = regenerated(base, load_recipe(options.recipe, [*options.overrides, source, options.regeneration]))
        sources = {GIVEN: str(text), REGENERATED: record.path}
        seeds = [one_seed(base, options, seed, sources, prompts) for seed in options.seeds]
    result = conditions_of(options) | {
        "tokens": options.tokens,
        "regeneration": record.model_dump(mode="json", exclude={"path", "source_revision"}),
        "seeds": seeds,
    }
    write_atomically(options.json or RESULT, json.dumps(result, indent=1) + "\n")
    for found in seeds:
        for how in ("sampled", "greedy"):
            print(f"seed {found['seed']}, {how}: {found[how]['difference']:+.1%}, at least "
                  f"{found[how]['lower_bound_97.5']:+.1%}")  # fmt: skip


if __name__ == "__main__":
    run_main(main)
