"""`python -m models.benchmark.standalone`: any exported draft on prompts from a file, without a run.

The same measurements as in a run; `draftsmith bench` starts it.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from infra.exit import run_main
from infra.files import write_atomically
from infra.records import TargetRecord
from infra.results import BenchmarkResult
from models.benchmark.conditions import conditions
from models.benchmark.config import BenchmarkConfig, PromotionConfig
from models.benchmark.contestants import load_contestants
from models.benchmark.evidence import gather
from models.benchmark.measure import measure
from models.benchmark.prompts import read_prompts
from models.benchmark.result import build_result
from models.benchmark.run import show
from models.data.conversations import source_hash
from models.dtypes import DTYPES
from models.export.description import read_description
from models.targets.config import TargetConfig
from models.targets.prepare import prepare_target


def find_target(name: str, aux_layer_ids: Sequence[int]) -> TargetRecord:
    """A local folder, a Hub id, or a Python package that ships a GGUF file (its name ends in `-gguf`)."""
    packaged = name.endswith("-gguf") and "/" not in name and not Path(name).exists()
    source: Literal["gguf-package", "huggingface"] = "gguf-package" if packaged else "huggingface"
    return prepare_target(TargetConfig(source=source, name=name, aux_layer_ids=tuple(aux_layer_ids)))


def bench(options: argparse.Namespace) -> BenchmarkResult:
    """Measure one draft on prompts from a file."""
    begun = time.perf_counter()
    lookaheads = _lookaheads(options.lookahead)
    config = BenchmarkConfig(
        prompts=options.num_prompts,
        prompt_tokens=options.prompt_tokens,
        max_new_tokens=options.max_new_tokens,
        lookahead=lookaheads[0],
        max_lookahead=max(7, *lookaheads),
        reference_tokens=options.reference_tokens,
        compute_dtype=options.dtype,
    )
    target = find_target(options.target, read_description(options.draft).aux_layer_ids)
    prompts, template_hash = read_prompts(str(options.prompts), target, config, options.chat_template, options.add_bos)
    contestants = load_contestants(Path(target.path), options.draft, options.champion, DTYPES[config.compute_dtype])
    found = measure(contestants, config, lookaheads, prompts, options.seed)
    dataset_hash, label = source_hash(str(options.prompts)), str(options.champion)
    under = conditions(
        config,
        contestants.target,
        target=target,
        draft=options.draft,
        dataset_hash=dataset_hash,
        template_hash=template_hash,
        prompts=len(prompts),
        texts=zip(prompts, found.greedy, strict=True),
    )
    wall_s = time.perf_counter() - begun
    evidence = gather(found, (), config, PromotionConfig(), dataset_hash=dataset_hash, champion_label=label)
    return build_result(found, config, under, evidence, wall_s=wall_s)


def _lookaheads(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(1 <= lookahead <= 16 for lookahead in found):
        raise ValueError(f"--lookahead {text!r}: give numbers from 1 to 16 with commas, for instance 3,5")
    return list(dict.fromkeys(found))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="local folder, Hub id, or GGUF package")
    parser.add_argument("--draft", type=Path, required=True, help="exported draft")
    parser.add_argument("--champion", type=Path, help="another exported draft to compare with")
    parser.add_argument("--prompts", type=Path, required=True, help=".jsonl of conversations or text, or .txt")
    parser.add_argument("--lookahead", default="4", help="decoded for real at each; the gate judges at the first")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--num-prompts", type=int, default=48)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--reference-tokens", type=int, default=1000)
    parser.add_argument("--chat-template", choices=["auto", "tokenizer", "none"], default="auto")
    parser.add_argument("--add-bos", action="store_true", help="as in the recipe's target.add_bos")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the result here")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    result = bench(options)
    if options.json:
        write_atomically(options.json, result)
    show(result)


if __name__ == "__main__":
    run_main(main)
