"""`python -m models.benchmark.standalone`: exported drafts and baselines on suites of prompts, without a run.

What `draftsmith bench` starts. Acceptance by category and context, at several temperatures, lookaheads and tree shapes,
and speed by batch size, by the reference decoder. SGLang measures the drafts as well where asked, and
alone where the reference decoder cannot decode the target.
"""

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import TypeAdapter, ValidationError
from rich.console import Console

from infra.files.atomic import write_atomically
from infra.processes.exit import run_main
from infra.processes.process import Owner
from infra.provenance import git_sha
from infra.records.acceptance import Conditions
from infra.records.data_path import TargetRecord
from infra.refusal import Refusal
from infra.settings import leased_gpus
from infra.sglang.config import SGLangConfig
from models.benchmark.conditions import Counter, conditions
from models.benchmark.contestants import load_contestants
from models.benchmark.counter import why_no_reference
from models.benchmark.harness import Harness, HarnessPlan, branches, shape_of
from models.benchmark.harness_result import Cell, HarnessResult, lines, page, table
from models.benchmark.measure import logged_tokens
from models.benchmark.served import Setup, whats_missing
from models.benchmark.served_harness import ServedHarness
from models.config.bench_arguments import bench_parser
from models.config.benchmark import BenchmarkConfig
from models.config.data import TemplateArgument
from models.config.generator import GeneratorConfig
from models.config.machine import multiplies_bfloat16
from models.config.target import TargetConfig
from models.data.conversations import source_hash
from models.data.prompts import SuitePrompts, choose_template, find_suite_format, question_prompts, read_prompts
from models.data.tokenizer import read_tokenizer
from models.decoding.prompt_lookup import PromptLookup
from models.decoding.suffix_decoding import SuffixDecoding
from models.decoding.token_recycling import TokenRecycling
from models.devices import compute_device, leased_bytes
from models.drafts.batched_proposer import ProposalSource
from models.dtypes import DTYPES
from models.export.description import read_description
from models.targets.prepare import prepare_target
from models.targets.recommended import left_out

BASELINES: dict[str, type[PromptLookup] | type[TokenRecycling] | type[SuffixDecoding]] = {
    "prompt-lookup": PromptLookup,
    "token-recycling": TokenRecycling,
    "suffix": SuffixDecoding,
}
DRAFT, CHAMPION = "draft", "champion"
REFERENCE: Literal["reference"] = "reference"
SGLANG: Literal["sglang"] = "sglang"
AUTO = "auto"
Item = TypeVar("Item")


def find_target(name: str, aux_layer_ids: Sequence[int]) -> TargetRecord:
    """A local folder, a Hub id, or a Python package that ships a GGUF file (its name ends in `-gguf`)."""
    packaged = name.endswith("-gguf") and "/" not in name and not Path(name).exists()
    source: Literal["gguf-package", "huggingface"] = "gguf-package" if packaged else "huggingface"
    return prepare_target(TargetConfig(source=source, name=name, aux_layer_ids=tuple(aux_layer_ids)))


def bench(options: argparse.Namespace) -> HarnessResult:
    """Measure what the options name. Raises Refusal, with the remedy, for what cannot be measured."""
    begun = time.perf_counter()
    fast = compute_device().type == "cuda" or multiplies_bfloat16()
    dtype = options.dtype or ("bfloat16" if fast else "float32")
    shapes = tuple(_listed(options.lookahead, str) + _listed(options.tree, str))
    for shape in shapes:
        shape_of(shape)
    folders = {DRAFT: options.draft} | ({CHAMPION: options.champion} if options.champion else {})
    aux_layer_ids = read_description(options.draft).aux_layer_ids
    target = find_target(options.target, aux_layer_ids)
    engines = _engines(options, target, dtype)
    if SGLANG in engines and leased_gpus():
        SGLangConfig().check_gpu_dtype(dtype, "--dtype")
    config = BenchmarkConfig(
        prompts=options.num_prompts, prompt_tokens=options.prompt_tokens, max_new_tokens=options.max_new_tokens,
    )  # fmt: skip
    suites = _suites(options, target, config)
    plan = _plan(options, suites, shapes)

    def under(counter: Counter, sources: Iterable[str]) -> dict[tuple[str, str], Conditions]:
        return {
            # A baseline's draft is None.
            (name, source): conditions(
                config, counter, target=target, draft=folders.get(source), dataset_hash=suite.dataset_hash,
                template_hash=suite.template_hash, prompts=len(suite.prompts),
            )
            for name, suite in suites.items()
            for source in sources
        }  # fmt: skip

    trees, cells = [shape for shape in shapes if not shape.isdigit()], list[Cell]()
    notes = [caveat] if (caveat := left_out(Path(target.path))) else []
    asked = _asked_baselines(options, target)
    # SGLang refuses GPUs that something else occupies: its servers have stopped before anything is loaded here.
    if SGLANG in engines:
        missing = {name: whats_missing(folder, plan.batches) for name, folder in folders.items()}
        notes += [f"{name} in SGLang: {why}" for name, why in missing.items() if why]
        served = {name: folder for name, folder in folders.items() if not missing[name]}
        counter = Counter.sglang(dtype, plan.together, target.quantization)
        cells += serve(plan, under(counter, served), target, served, dtype, options)
    if REFERENCE in engines:
        loaded = load_contestants(Path(target.path), list(folders.values()), DTYPES[dtype])
        sources: dict[str, ProposalSource] = dict(zip(folders, loaded.drafts, strict=True)) | asked
        counted = under(Counter.reference(loaded.target), sources)
        cells = [*Harness(loaded, sources, plan, config, counted).measure(), *cells]
        chains_only = [name for name, source in sources.items() if trees and not branches(source)]
        notes += [f"{name} proposes chains only: no figures for {', '.join(trees)}" for name in chains_only]
    if not cells:
        raise Refusal("; ".join(notes))
    return HarnessResult(
        commit=git_sha(),
        date=time.strftime("%Y-%m-%d"),
        too_long={name: suite.too_long for name, suite in suites.items()},
        cells=tuple(cells),
        notes=tuple(notes),
        wall_s=time.perf_counter() - begun,
    )


def serve(
    plan: HarnessPlan,
    under: Mapping[tuple[str, str], Conditions],
    target: TargetRecord,
    drafts: Mapping[str, Path],
    dtype: str,
    options: argparse.Namespace,
) -> list[Cell]:
    """Measure drafts in SGLang; empty if it can serve none of them."""
    if not drafts:
        return []
    with tempfile.TemporaryDirectory(prefix="draftsmith-serving-") as logs:
        setup = Setup(
            target=Path(target.path),
            generator=GeneratorConfig(engine=SGLANG),
            dtype=dtype,
            prompt_tokens=options.prompt_tokens,
            max_new_tokens=options.max_new_tokens,
            concurrency=plan.batches or (1,),
            owner=Owner(f"bench-{os.getpid()}", Path(logs)),
        )
        return ServedHarness(setup, drafts, plan, under).measure()


def _engines(options: argparse.Namespace, target: TargetRecord, dtype: str) -> list[str]:
    """The engines asked for. Raises Refusal for the reference decoder where it cannot decode the target."""
    why = why_no_reference(target, target.quantization, dtype, leased_bytes())
    engines = _listed(options.engines, str)
    if engines == [AUTO]:
        return [SGLANG if why else REFERENCE]
    if not engines or not {*engines} <= {REFERENCE, SGLANG}:
        raise Refusal(
            f"--engines {options.engines!r}: give {AUTO}, {REFERENCE}, {SGLANG}, or the last two with a comma"
        )
    if why and REFERENCE in engines:
        raise Refusal(f"--engines {options.engines}: {why}: give {SGLANG}, which counts its acceptance itself")
    return engines


def _asked_baselines(options: argparse.Namespace, target: TargetRecord) -> dict[str, ProposalSource]:
    found = baselines(_listed(options.baselines, str))
    if options.suffix_log:
        found["suffix-warm"] = SuffixDecoding(logged_tokens(target, options.suffix_log))
    return found


def baselines(names: Sequence[str]) -> dict[str, ProposalSource]:
    """What needs no training, by name. Raises Refusal for another name."""
    for name in names:
        if name not in BASELINES:
            raise Refusal(f"--baselines {name!r}: there are {', '.join(BASELINES)}")
    return {name: BASELINES[name]() for name in names}


def _plan(options: argparse.Namespace, suites: dict[str, SuitePrompts], shapes: tuple[str, ...]) -> HarnessPlan:
    temperatures, batches = _listed(options.temperature, float), _listed(options.batch, int)
    if not temperatures or not all(0 <= temperature < math.inf for temperature in temperatures):
        raise Refusal(f"--temperature {options.temperature!r}: give numbers from 0 on with commas, for instance 0,1")
    if batches and not 1 <= min(batches) <= max(batches) <= 32:
        raise Refusal(f"--batch {options.batch!r}: give numbers from 1 to 32 with commas, or nothing for no speed")
    return HarnessPlan(
        suites, shapes, tuple(temperatures), tuple(batches), options.repeats, options.timed_prompts,
        options.verified_prompts, options.max_new_tokens, options.seed,
    )  # fmt: skip


def _listed(text: str, kind: Callable[[str], Item]) -> list[Item]:
    """`1,4`; raises Refusal for what is of another kind."""
    try:
        return list(dict.fromkeys(kind(part.strip()) for part in text.split(",") if part.strip()))
    except ValueError as error:
        raise Refusal(f"{text!r}: give numbers with commas, for instance 1,4") from error


def _suites(options: argparse.Namespace, target: TargetRecord, config: BenchmarkConfig) -> dict[str, SuitePrompts]:
    """Prompts by suite; a suite is `NAME=SOURCE`, or a name that is a source as well."""
    asked = [(name, source or name) for name, _, source in (suite.partition("=") for suite in options.suite)]
    asked += [(prompts.stem, str(prompts)) for prompts in options.prompts]
    if not asked:
        raise Refusal("no prompts: give --suite (for instance gsm8k, or gsm8k=FILE), or --prompts FILE")
    found = {}
    for name, source in asked:
        if name in found:
            raise Refusal(f"two suites are named {name}: name one of them otherwise, by --suite NAME={source}")
        try:
            found[name] = _suite(name, source, options, target, config)
        except Refusal as error:
            raise Refusal(f"--suite {name}: {error}") from error
    return found


def _suite(
    name: str, source: str, options: argparse.Namespace, target: TargetRecord, config: BenchmarkConfig
) -> SuitePrompts:
    layout = find_suite_format(name, source)
    arguments = _template_arguments(options.template_arguments)
    if layout is None:
        prompts, template = read_prompts(source, target, config, options.chat_template, options.add_bos, arguments)
        return SuitePrompts(prompts, (), source_hash(source), template)
    chosen = choose_template(read_tokenizer(target.path), options.chat_template, plain=False)
    return question_prompts(
        source, layout, Path(target.path), count=options.num_prompts, prompt_tokens=options.prompt_tokens,
        chat_template=chosen, template_arguments=arguments, add_bos=options.add_bos,
    )  # fmt: skip


def _template_arguments(text: str) -> dict[str, TemplateArgument]:
    """The JSON object of `--template-arguments`. Raises Refusal for anything else."""
    try:
        return TypeAdapter(dict[str, TemplateArgument]).validate_json(text)
    except ValidationError as error:
        raise Refusal(
            f"--template-arguments {text!r}: give a JSON object, for instance '{{\"enable_thinking\": false}}'"
        ) from error


def _check_writable(file: Path) -> None:
    """Raise Refusal, before hours of measuring, where no such file can be written."""
    there = next(place for place in file.absolute().parents if os.path.lexists(place))
    if file.is_dir() or not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise Refusal(f"{file} cannot be written: give --json and --page a file in a folder that you may write to")


def main() -> None:
    options = bench_parser().parse_args()
    for place in filter(None, (options.json, options.page)):
        _check_writable(place)
    result = bench(options)
    console = Console(markup=False)
    for suite in result.suites:
        console.print(table(result, suite))
    print("\n".join(lines(result)), flush=True)
    if options.json:
        write_atomically(options.json, result)
    if options.page:
        write_atomically(options.page, page(result))
    if any(cell.mismatches for cell in result.cells):
        sys.exit(1)


if __name__ == "__main__":
    run_main(main)
