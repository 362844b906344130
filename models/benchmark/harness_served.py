"""`draftsmith bench --engines sglang`: a harness's drafts in the serving engine, on the same suites, in the same table.

One SGLang server for the target alone, and one for each draft and lookahead; greedy, chains. Runs in the process of
`models.benchmark.standalone`.
"""

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from infra.sglang.client import Answer, SGLangClient
from infra.sglang.environment import sglang_version
from models.benchmark.harness import Cell, Harness, Place, Repeat, Speeds, speed
from models.benchmark.serving import Setup, ask_all, counts_of
from models.decoding.speculative import Decoded
from models.progress_bars import Bar, bars


class ServedHarness:
    """Measures every chain of a plan, for every draft, greedily."""

    def __init__(self, harness: Harness, setup: Setup, drafts: Mapping[str, Path]):
        """`drafts`: exports by the name that is written down; the engine can serve all of them."""
        self.harness, self.plan, self.setup, self.drafts = harness, harness.plan, setup, drafts
        self.engine = f"sglang {sglang_version()}"

    def measure(self) -> list[Cell]:
        """Measure every cell. Raises Refusal for what a person has to correct."""
        found, chains = list[Cell](), [int(shape) for shape in self.plan.shapes if shape.isdigit()]
        with bars() as bar:
            with self.setup.serving(None, 0) as client:
                plain = {suite: self._speeds(client, suite, bar) for suite in self.plan.suites}
            for name, draft in self.drafts.items():
                for lookahead in chains:
                    with self.setup.serving(draft, lookahead) as client:
                        found += [self._cell(client, suite, name, lookahead, plain[suite], bar) for suite in plain]
        return found

    def _cell(self, client: SGLangClient, suite: str, name: str, lookahead: int, plain: Speeds, bar: Bar) -> Cell:
        prompts = self.plan.suites[suite].prompts
        watched = bar(f"{suite}, {name} in SGLang, step by step", len(prompts))
        answers = self.setup.watch_all(client, prompts, lambda _: watched(1))
        speeds = [speed(batch, plain[batch], repeats) for batch, repeats in self._speeds(client, suite, bar).items()]
        decoded = [_decoded(answer, lookahead) for answer in answers]
        return self.harness.cell(Place(suite, 0.0, name, str(lookahead)), decoded, speeds, self.engine)

    def _speeds(self, client: SGLangClient, suite: str, bar: Bar) -> Speeds:
        """Every repeat; the pass that warms up, and leaves the prompts in the engine's cache, is not counted."""
        found: dict[int, list[Repeat]] = {}
        # No text ends early, so that as many requests run all the time.
        ask = partial(client.generate, sampling=self.setup.greedy | {"ignore_eos": True})
        for batch in self.plan.batches:
            prompts, advance = self.plan.timed(suite, batch), bar(f"{suite}, {batch} at a time", self.plan.repeats)
            ask_all(ask, prompts, batch)
            found[batch] = []
            for _ in range(self.plan.repeats):
                begun = time.perf_counter()
                found[batch].append(_repeat(ask_all(ask, prompts, batch), time.perf_counter() - begun))
                advance(1)
        return found


def _decoded(answer: Answer, lookahead: int) -> Decoded:
    return Decoded(tuple(answer.tokens), counts_of(answer, lookahead))


def _repeat(answers: Sequence[Answer], seconds: float) -> Repeat:
    tokens = sum(len(answer.tokens) for answer in answers)
    steps = sum(answer.meta.get("spec_verify_ct", len(answer.tokens) - 1) for answer in answers)
    return Repeat(tokens / seconds, (tokens - len(answers)) / max(1, steps))
