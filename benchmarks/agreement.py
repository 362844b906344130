"""Do the simulated walk, the reference decoder and SGLang say the same of a draft? Greedy, on several sets of prompts.

    python benchmarks/agreement.py [RECIPE] [section.field=value ...] [--draft EXPORT] [--prompts 32]
                                   [--gsm8k FILE] [--spec-bench FILE]

The draft is trained here unless one is given. Sets: the recipe's text, and the questions of GSM8K and Spec-Bench where
their files are given (or named by DRAFTSMITH_GSM8K and DRAFTSMITH_SPEC_BENCH), continued as plain text. Walk: over the
target's own text, one forward. Reference: real decoding in transformers, every text alone. Served: SGLang's steps as
they arrive, several requests at a time; without a GPU with the tests' kernels (`make .venv-sglang/.test-ready`).
Writes benchmarks/results/agreement-RECIPE-METHOD.json; exit status 1 where two differ by more than the bar.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from prepared import trained_export
from rich.progress import track
from sources import QUESTION_TOKENS, add_question_arguments, question_sets

from infra.files.atomic import write_atomically
from infra.processes.exit import run_main
from infra.processes.process import Owner
from infra.provenance import git_sha
from infra.records.acceptance import Conditions
from infra.records.data_path import Record, TargetRecord
from models.benchmark.conditions import Counter, conditions
from models.benchmark.contestants import Contestants, load_contestants
from models.benchmark.served import Setup, counts_of, whats_missing
from models.config.recipe import RunConfig, load_recipe
from models.data.conversations import source_hash
from models.data.prompts import read_prompts
from models.decoding.acceptance import AcceptedCounts, acceptance_length, distinct_token_share
from models.decoding.continuations import continue_batch
from models.decoding.simulated import features, simulate
from models.decoding.speculative import speculate
from models.targets.prepare import prepare_target

ROOT = Path(__file__).parents[1]
BAR = 0.05


class Agreement(Record):
    """One set of prompts."""

    prompts: str
    conditions: Conditions
    lengths: dict[str, float]
    """Acceptance length of the walk, of reference decoding, and served."""
    largest_difference: float
    """Of two of them, relative to the smaller."""
    same_counts: dict[str, int]
    """Conversations whose counts are the walk's, step by step."""
    distinct_token_share: float


class AgreementResult(Record):
    """What is committed."""

    commit: str
    date: str
    method: str
    """Of the draft."""
    concurrency: int
    bar: float
    sets: tuple[Agreement, ...]
    wall_s: float


def prompt_sets(config: RunConfig, target: TargetRecord, options: argparse.Namespace) -> dict[str, tuple[list, str]]:
    """Token ids of every set's prompts, and the hash of its file."""
    settings = config.benchmark.model_copy(update={"prompts": options.prompts})
    tokens, _ = read_prompts(config.data.source, target, settings, "none", config.target.add_bos)
    found = {config.data.source: (tokens, source_hash(config.data.source))}
    suites = question_sets(options, target, config.target.add_bos)
    return found | {name: (suite.prompts, suite.dataset_hash) for name, suite in suites.items()}


@torch.no_grad()
def walk(
    loaded: Contestants, prompts: Sequence[list[int]], texts: Sequence[list[int]], lookahead: int
) -> list[AcceptedCounts]:
    """Simulated counts of every conversation."""
    found = []
    for prompt, text in zip(track(prompts, "walk"), texts, strict=True):
        aux = features(loaded.target, [*prompt, *text])
        found.append(simulate(loaded.draft, prompt, text, aux, lookahead, eos_ids=loaded.eos_ids)[-1])
    return found


def decode(loaded: Contestants, prompts: Sequence[list[int]], lookahead: int, most: int) -> list[AcceptedCounts]:
    """Counts of real decoding."""
    return [
        speculate(loaded.target, loaded.draft, prompt, lookahead, most, loaded.eos_ids).counts
        for prompt in track(prompts, "reference")
    ]


def measure(options: argparse.Namespace, config: RunConfig, draft: Path) -> AgreementResult:
    """All sets."""
    begun, commit = time.perf_counter(), git_sha()
    settings, target = config.benchmark, prepare_target(config.target)
    loaded = load_contestants(Path(target.path), [draft], torch.float32)
    missing = whats_missing(draft, (options.concurrency,))
    if missing:
        raise ValueError(missing)
    sets = prompt_sets(config, target, options)
    setup = Setup(
        Path(target.path), config.generator, "float32", QUESTION_TOKENS, settings.max_new_tokens,
        (options.concurrency,), Owner(f"agreement-{os.getpid()}", options.logs),
    )  # fmt: skip
    with setup.serving(draft, settings.lookahead) as client:
        answers = {name: setup.watch_all(client, prompts) for name, (prompts, _) in sets.items()}
    found = []
    for name, (prompts, dataset_hash) in sets.items():
        texts = continue_batch(loaded.target, prompts, settings.max_new_tokens, loaded.eos_ids)
        counts = {
            "walk": walk(loaded, prompts, texts, settings.lookahead),
            "reference": decode(loaded, prompts, settings.lookahead, settings.max_new_tokens),
            "served": [counts_of(answer, settings.lookahead, loaded.eos_ids) for answer in answers[name]],
        }
        under = conditions(
            settings, Counter.reference(loaded.target), target=target, draft=draft, dataset_hash=dataset_hash,
            template_hash="none", prompts=len(prompts),
        )  # fmt: skip
        found.append(agreement(name, under, counts, distinct_token_share(texts)))
        print(name, {way: round(length, 3) for way, length in found[-1].lengths.items()}, flush=True)
    return AgreementResult(
        commit=commit, date=time.strftime("%Y-%m-%d"), method=config.draft.method, concurrency=options.concurrency,
        bar=BAR, sets=tuple(found), wall_s=time.perf_counter() - begun,
    )  # fmt: skip


def agreement(name: str, under: Conditions, counts: dict[str, list[AcceptedCounts]], share: float) -> Agreement:
    """One set's row."""
    lengths = {way: acceptance_length(each) for way, each in counts.items()}
    same = {
        way: sum(one == other for one, other in zip(each, counts["walk"], strict=True)) for way, each in counts.items()
    }
    return Agreement(
        prompts=name, conditions=under, lengths=lengths, same_counts=same, distinct_token_share=share,
        largest_difference=max(lengths.values()) / min(lengths.values()) - 1,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, nargs="?", default=ROOT / "recipes" / "tiny.yaml")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--draft", type=Path, help="exported draft for its target; default: one is trained")
    parser.add_argument("--prompts", type=int, default=32, help="of each set")
    parser.add_argument("--concurrency", type=int, default=4, help="requests at a time")
    add_question_arguments(parser)
    parser.add_argument("--logs", type=Path, default=Path("runs/agreement"), help="of SGLang's server")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not torch.cuda.is_available():
        os.environ.setdefault("SGLANG_PLATFORM", "draftsmith_test_cpu")
    config = load_recipe(options.recipe, options.overrides)
    with tempfile.TemporaryDirectory(prefix="draftsmith-agreement-") as name:
        draft = options.draft or trained_export(Path(name) / "run", options.recipe, options.overrides)
        result = measure(options, config, draft)
    path = ROOT / "benchmarks" / "results" / f"agreement-{options.recipe.stem}-{config.draft.method}.json"
    write_atomically(path, result)
    worst = max(one.largest_difference for one in result.sets)
    print(f"at most {worst:.1%} apart in {len(result.sets)} sets, {result.wall_s:.0f} s: {path}")
    if worst > BAR:
        raise SystemExit(1)


if __name__ == "__main__":
    run_main(main)
