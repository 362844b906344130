"""Speculative decoding against the target alone over many tokens; writes benchmarks/results/lossless-<target>.json.

    python benchmarks/lossless.py --target T --draft D --prompts FILE [--tokens 20000] [--lookahead 4]

Every speculative text is compared with a plain greedy one: the first `--plain-tokens` tokens with plain decoding at
batch 1, the rest with plain decoding of many prompts at once (no padding: every row has its own positions). After a
divergence the comparison goes on from the speculative prefix. Gemma 3 270M on two cores: about half an hour.
"""

import argparse
import time
from pathlib import Path

from infra.exit import run_main
from infra.files import write_atomically
from infra.records import Record
from infra.results import Conditions, LosslessRecord
from models.benchmark.acceptance import acceptance_length, distinct_token_share
from models.benchmark.conditions import conditions
from models.benchmark.config import BenchmarkConfig
from models.benchmark.contestants import load_contestants
from models.benchmark.prompts import read_prompts
from models.benchmark.reference import decode_reference
from models.benchmark.result import lossless_record
from models.benchmark.standalone import find_target, read_aux_layer_ids
from models.data.conversations import source_hash
from models.decoding.plain import continue_batch
from models.dtypes import DTYPES

RESULTS = Path(__file__).parent / "results"


class LosslessResult(Record):
    """What is committed."""

    conditions: Conditions
    lossless: LosslessRecord
    conversations: int
    compared_at_batch_one: int
    """Tokens after the prefill that were compared with plain decoding at batch 1; the rest with batched decoding."""
    acceptance_length: float
    distinct_token_share: float
    wall_s: float


def check(options: argparse.Namespace) -> LosslessResult:
    """Decode and compare; raises ValueError where the prompts do not give enough tokens."""
    begun = time.perf_counter()
    config = BenchmarkConfig(
        prompts=-(-2 * options.tokens // options.max_new_tokens),
        prompt_tokens=options.prompt_tokens,
        max_new_tokens=options.max_new_tokens,
        lookahead=options.lookahead,
        reference_tokens=options.tokens,
        timed_tokens=options.plain_tokens,
        compute_dtype=options.dtype,
    )
    target = find_target(options.target, read_aux_layer_ids(options.draft))
    prompts, template_hash = read_prompts(str(options.prompts), target, config, options.chat_template, options.add_bos)
    contestants = load_contestants(Path(target.path), options.draft, None, DTYPES[options.dtype])
    texts: list[list[int]] = []
    while prompts[len(texts) :] and sum(map(len, texts)) < options.tokens:
        batch = prompts[len(texts) : len(texts) + config.batch_size]
        texts += continue_batch(contestants.target, batch, config.max_new_tokens, 0.0, contestants.eos_ids)
        print(f"plain: {sum(map(len, texts))} tokens, {time.perf_counter() - begun:.0f} s", flush=True)
    if sum(map(len, texts)) < options.tokens:
        raise ValueError(
            f"{len(prompts)} prompts give {sum(map(len, texts))} tokens, {options.tokens} are wanted: give more text, "
            "or a larger --max-new-tokens"
        )
    done = [0]

    def advance(tokens: int) -> None:
        done.append(done[-1] + tokens)
        print(f"speculative: {done[-1]} tokens, {time.perf_counter() - begun:.0f} s", flush=True)

    used = prompts[: len(texts)]
    run = decode_reference(contestants, config, options.lookahead, used, texts, advance)
    return LosslessResult(
        conditions=conditions(
            config,
            contestants.target,
            target=target,
            draft=options.draft,
            dataset_hash=source_hash(str(options.prompts)),
            template_hash=template_hash,
            prompts=len(run.decoded),
        ),
        lossless=lossless_record(run.lossless),
        conversations=len(run.decoded),
        compared_at_batch_one=run.speed.tokens,
        acceptance_length=acceptance_length([result.counts for result in run.decoded]),
        distinct_token_share=distinct_token_share(texts),
        wall_s=time.perf_counter() - begun,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="local folder, Hub id, or GGUF package")
    parser.add_argument("--draft", type=Path, required=True, help="exported draft")
    parser.add_argument("--prompts", required=True, help=".jsonl, .txt, or python-docs")
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--plain-tokens", type=int, default=1_000)
    parser.add_argument("--lookahead", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--chat-template", choices=["auto", "tokenizer", "none"], default="auto")
    parser.add_argument("--add-bos", action="store_true", help="as in the recipe's target.add_bos")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/lossless-<target>.json")
    options = parser.parse_args()
    result = check(options)
    path = options.out or RESULTS / f"lossless-{Path(options.target).name}.json"
    write_atomically(path, result)
    found = result.lossless
    print(f"{found.tokens} tokens, {found.mismatches} mismatches, {found.ties} ties in {result.wall_s:.0f} s: {path}")
    if found.mismatches:
        raise SystemExit(1)


if __name__ == "__main__":
    run_main(main)
