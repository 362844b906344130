"""The options of `draftsmith bench`, read by the command line and by the process that measures."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

DESCRIPTION = """\
Measure a draft beside baselines that need no training: acceptance by category and context length, and speed by batch
size. Lists are given with commas. It leases one GPU of this machine, or all that $CUDA_VISIBLE_DEVICES names."""
USAGE = "draftsmith bench --target TARGET --draft FOLDER (--suite NAME[=SOURCE] | --prompts FILE) [options]"


def bench_parser() -> argparse.ArgumentParser:
    """The parser; lists stay text."""
    parser = argparse.ArgumentParser("draftsmith bench", usage=USAGE, description=DESCRIPTION, allow_abbrev=False)

    def add(name: str, *, help: str, **settings: Any) -> None:
        shown = f"{help} (default: {settings['default']})" if settings.get("default") else help
        parser.add_argument(name, help=shown, **settings)

    _add_what(add)
    _add_how(add)
    return parser


def _add_what(add: Callable[..., None]) -> None:
    """Target, drafts, prompts and baselines."""
    add("--target", required=True, help="local folder, Hub id, or GGUF package")
    add("--draft", type=Path, metavar="FOLDER", required=True, help="folder of an exported draft")
    add("--champion", type=Path, metavar="FOLDER", help="folder of another exported draft to compare with")
    add("--champion-of", metavar="MODEL", help="compare with the champion of this registered model")
    add(
        "--suite", action="append", default=[], metavar="NAME[=SOURCE]",
        help="spec-bench, mt-bench, gsm8k, humaneval, math500, or NAME=SOURCE; may be repeated",
    )  # fmt: skip
    add(
        "--prompts",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="your own .jsonl or .txt; may be repeated",
    )
    add(
        "--engines",
        default="auto",
        help="reference, sglang (drafts, greedy, chains), or both; auto: sglang where the target is quantized or "
        "exceeds one device, else reference",
    )
    add("--baselines", default="prompt-lookup,token-recycling,suffix", help="empty for none")
    add(
        "--suffix-log", type=Path, metavar="FILE",
        help="a log of served requests (.jsonl or .jsonl.gz, as in docs/drift.md): adds the baseline suffix-warm, "
        "suffix decoding that knows the log",
    )  # fmt: skip


def _add_how(add: Callable[..., None]) -> None:
    """Shapes, temperatures, numbers of prompts, and where the result goes."""
    add("--lookahead", default="4", help="numbers of proposed tokens, for example 3,5")
    add("--tree", default="", help="trees by depth, top-k and tokens, for example dynamic-5-4-16")
    add("--temperature", default="0,1", help="0 is greedy; others with the target's own top-k and top-p")
    add(
        "--batch", default="1",
        help="batch sizes whose speed is measured, on the first suite at the first temperature, at most 32; empty for "
        "none",
    )  # fmt: skip
    add("--repeats", type=at_least(3), default=3, help="repeats of a speed measurement, after a warm-up")
    add("--timed-prompts", type=at_least(1), default=2, help="prompts per repeat")
    add(
        "--verified-prompts", type=at_least(1), default=2,
        help="greedy prompts per suite and source that are decoded for real; the rest of a chain's acceptance comes "
        "from walks over the target's own text",
    )  # fmt: skip
    add("--num-prompts", type=at_least(2), default=48, help="prompts per suite, spread over its categories")
    add("--prompt-tokens", type=at_least(2), default=512, help="longer questions are left out")
    add("--max-new-tokens", type=at_least(4), default=64, help="longest continuation")
    add("--chat-template", default="auto", help="tokenizer (the target's own), none, or a Jinja file")
    add("--template-arguments", metavar="JSON", default="{}", help="arguments of the chat template")
    add("--add-bos", action="store_true", help="as in the recipe's target.add_bos")
    add(
        "--dtype",
        choices=["float32", "bfloat16"],
        help="of target and drafts (default: bfloat16 on GPUs and on processors that are faster in it, else float32)",
    )
    add("--seed", type=int, default=0, help="of sampled decoding")
    add("--json", type=Path, metavar="FILE", help="write the result to this file")
    add("--page", type=Path, metavar="FILE", help="write a Markdown page to this file")


def at_least(smallest: int) -> Callable[[str], int]:
    """The type of an option that is an integer with a lower bound."""

    def number(text: str) -> int:
        value = int(text)
        if value < smallest:
            raise argparse.ArgumentTypeError(f"{value} is less than {smallest}")
        return value

    number.__name__ = "number"  # argparse names the type in its message
    return number
