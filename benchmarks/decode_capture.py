"""One pass against two: hidden states captured while the target answers, or by a prefill of what it has answered.

One SGLang server that captures, its prompts the beginnings of samples. Each round answers with capture, and answers
without it and then prefills every text; which of the two comes first alternates. The answers are sampled and of one
length, so both do equal work. Then the states of decoding are compared with those of a prefill of the same text, in
each data type.

    python benchmarks/decode_capture.py [--targets tiny gemma3-270m] [--rounds 3] [--prompts 16] [--new-tokens 256]
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path
from typing import Any

import torch
from machine import cpu_model
from prepared import prepared_run

from infra.files.atomic import write_atomically
from infra.processes.exit import run_main
from infra.provenance import git_sha, hardware
from models.capture.sglang.engine import PREFILL, SGLangEngine
from models.run import PreparedRun
from models.targets.hidden_states import HiddenStates

RESULT = Path(__file__).parent / "results" / "decode_capture.json"
RECIPES = {"tiny": "tiny", "gemma3-270m": "quickstart"}
PROMPT_TOKENS = 64
IN_FLIGHT = 8


def timed(ask: Callable[[int], object], prompts: int) -> float:
    """Seconds for all prompts, IN_FLIGHT at a time."""
    begun = time.perf_counter()
    with ThreadPoolExecutor(IN_FLIGHT) as threads:
        list(threads.map(ask, range(prompts)))
    return time.perf_counter() - begun


class Passes:
    """Both ways on one server."""

    def __init__(self, engine: SGLangEngine, prompts: Sequence[torch.Tensor], new_tokens: int):
        self.engine, self.prompts, self._serial = engine, prompts, count()
        self._sampling = {"max_new_tokens": new_tokens, "temperature": 0.7, "ignore_eos": True}

    def one(self) -> float:
        """Seconds of one pass."""
        return timed(lambda index: self._capture(self.prompts[index], self._sampling), len(self.prompts))

    def two(self) -> tuple[float, float]:
        """Seconds of answering, and of prefilling the texts."""
        texts: dict[int, torch.Tensor] = {}

        def answer(index: int) -> None:
            prompt = self.prompts[index].tolist()
            answered = self.engine._client.generate(prompt, self._sampling)
            texts[index] = torch.tensor([*prompt, *answered.tokens])

        return timed(answer, len(self.prompts)), timed(lambda index: self._capture(texts[index], PREFILL), len(texts))

    def _capture(self, tokens: torch.Tensor, sampling: Any) -> None:
        captured, _ = self.engine.request(f"passes/0/{next(self._serial)}/1", tokens, (), sampling)
        self.engine.transport.delete(captured.record.key)


def compare(engine: SGLangEngine, prompts: Sequence[torch.Tensor], new_tokens: int) -> dict[str, float]:
    """Distances between states of decoding and of a prefill over the answers' rows, relative to their size."""
    pairs: list[tuple[HiddenStates, HiddenStates]] = []
    for prompt in prompts:
        sampling = {"max_new_tokens": new_tokens, "temperature": 0.7, "ignore_eos": True}
        decoded, answer = engine._take_back("decoded", prompt, (), sampling)
        prefilled, _ = engine._take_back("prefilled", torch.tensor([*prompt.tolist(), *answer[:-1]]), (), PREFILL)
        answered = slice(len(prompt), None)
        pairs.append((decoded.rows(answered), prefilled.rows(answered)))
    found: dict[str, float] = {}
    for name in ("aux", "last"):
        mine, theirs = (torch.cat([getattr(pair[side], name).float() for pair in pairs]) for side in (0, 1))
        found[f"{name}_relative_distance"] = float(f"{((mine - theirs).norm() / theirs.norm()).item():.3g}")
        found[f"{name}_worst_row"] = float(f"{((mine - theirs).norm(dim=1) / theirs.norm(dim=1)).max().item():.3g}")
    tops = [(pair[0].top, pair[1].top) for pair in pairs]
    if all(mine is not None and theirs is not None for mine, theirs in tops):
        equal = torch.cat([mine == theirs for mine, theirs in tops if mine is not None and theirs is not None])
        found["equal_top_tokens"] = round(equal.float().mean().item(), 5)
    return found | {"rows": sum(len(mine.last) for mine, _ in pairs)}


def settings(dtype: str, new_tokens: int) -> list[str]:
    return [
        "generator.engine=sglang", f"generator.compute_dtype={dtype}", f"generator.stored_dtype={dtype}",
        f"generator.sglang.requests_in_flight={IN_FLIGHT}", "generator.threads=null", "draft.vocab_size=700",
        f"data.max_tokens={PROMPT_TOKENS + new_tokens}", "transport.budget_mib=1024",
    ]  # fmt: skip


def measure(run: PreparedRun, options: argparse.Namespace, dtype: str) -> dict[str, Any]:
    samples = run.open_samples()
    prompts = [samples[index].tokens[:PROMPT_TOKENS] for index in range(options.prompts)]
    with closing(SGLangEngine(run, 0)) as engine:
        found: dict[str, Any] = {"states": compare(engine, prompts[:8], options.new_tokens)}
        if dtype == "float32":
            passes, rounds = Passes(engine, prompts, options.new_tokens), []
            for warm in (passes.one, passes.two):
                warm()
            for number in range(options.rounds):
                first = passes.one() if number % 2 else None  # what comes second finds the machine as the first left it
                answered, prefilled = passes.two()
                rounds.append((first or passes.one(), answered, prefilled))
                print(f"one pass {rounds[-1][0]:.1f} s, two {answered:.1f} + {prefilled:.1f} s", flush=True)
            ratios = [one / (answered + prefilled) for one, answered, prefilled in rounds]
            found["rounds_s"] = [[round(part, 2) for part in one] for one in rounds]
            found["one_pass_to_two"] = round(statistics.median(ratios), 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args()
    found: dict[str, Any] = {
        "commit": git_sha(), "date": time.strftime("%Y-%m-%d"), "hardware": hardware(), "cpu": cpu_model(),
        "prompts": options.prompts, "prompt_tokens": PROMPT_TOKENS, "new_tokens": options.new_tokens,
        "requests_in_flight": IN_FLIGHT,
    }  # fmt: skip
    for target in options.targets:
        for dtype in ("float32", "bfloat16"):
            with ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="draftsmith-")))
                recipe = Path(__file__).parents[1] / "recipes" / f"{RECIPES[target]}.yaml"
                name = folder / f"passes-{os.getpid()}"
                run = stack.enter_context(prepared_run(name, recipe, settings(dtype, options.new_tokens)))
                found.setdefault(target, {})[dtype] = measure(run, options, dtype)
                print(target, dtype, json.dumps(found[target][dtype]), flush=True)
    write_atomically(options.json, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    run_main(main)
