"""The drafts of `draftsmith bench` in SGLang, on the same suites and for the same table as the reference decoder's."""

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from infra.records.acceptance import Conditions
from infra.sglang.client import SGLangClient
from models.benchmark.engine_counts import ServedText
from models.benchmark.harness import Cells, HarnessPlan, Place, Repeat, Speeds, Verified, judged
from models.benchmark.harness_result import Cell
from models.benchmark.served import Setup, ask_all, counts_of
from models.decoding.lossless import compare_texts, total
from models.decoding.speculative import Decoded
from models.progress_bars import Bar, bars
from models.targets.model import eos_ids


class Watched(NamedTuple):
    """A suite in a server with a draft."""

    decoded: list[Decoded]
    speeds: Speeds


class ServedHarness(Cells):
    """Measures every chain of a plan in SGLang, for every draft, greedily, without the reference decoder.

    One server for each draft and lookahead, then one for the target alone, whose text theirs must equal.
    """

    def __init__(
        self,
        setup: Setup,
        drafts: Mapping[str, Path],
        plan: HarnessPlan,
        under: Mapping[tuple[str, str], Conditions],
    ):
        """`drafts`: exports by the name that is written down; the engine can serve all of them."""
        super().__init__(plan, under)
        self.setup, self.drafts = setup, drafts

    def measure(self) -> list[Cell]:
        """Measure every cell. Raises Refusal for what a person has to correct."""
        watched = dict[Place, Watched]()
        with bars() as bar:
            for name, draft in self.drafts.items():
                for shape in self.plan.chains:
                    with self.setup.serving(draft, shape) as client:
                        for suite in self.plan.suites:
                            place = Place(suite, 0.0, name, str(shape))
                            watched[place] = self._watched(client, place, bar)
            with self.setup.serving(None, 0) as client:
                own = ServedText(client, self.setup, eos_ids(self.setup.target))
                return [cell for suite in self.plan.suites for cell in self._cells(own, suite, watched, bar)]

    def _watched(self, client: SGLangClient, place: Place, bar: Bar) -> Watched:
        prompts = self.plan.suites[place.suite].prompts
        seen = bar(f"{place.suite}, {place.source} in SGLang, step by step", len(prompts))
        answers = self.setup.watch_all(client, prompts, seen)
        ends = eos_ids(self.setup.target)
        decoded = [Decoded(tuple(answer.tokens), counts_of(answer, int(place.shape), ends)) for answer in answers]
        return Watched(decoded, self._speeds(client, place.suite, place.source, bar))

    def _cells(self, own: ServedText, suite: str, watched: Mapping[Place, Watched], bar: Bar) -> Iterator[Cell]:
        """The suite's cells, once the target alone has written its texts."""
        prompts, ask = self.plan.suites[suite].prompts, partial(own.client.generate, sampling=self.setup.greedy)
        answered = bar(f"{suite}, target alone in SGLang", len(prompts))
        texts = [answer.tokens for answer in ask_all(ask, prompts, self.plan.together, answered)]
        plain = self._speeds(own.client, suite, "target alone", bar)
        for place, found in watched.items():
            if place.suite == suite:
                pairs = zip(prompts, found.decoded, texts, strict=True)
                compared = total(compare_texts(own, prompt, each.tokens, text) for prompt, each, text in pairs)
                whole = Verified(len(texts), None, compared)
                yield self.cell(place, found.decoded, whole, judged(plain, found.speeds))

    def _speeds(self, client: SGLangClient, suite: str, name: str, bar: Bar) -> Speeds:
        # No text ends early, so that as many requests run all the time.
        ask = partial(client.generate, sampling=self.setup.greedy | {"ignore_eos": True})

        def time_pass(prompts: Sequence[list[int]], batch: int, repeat: int) -> Repeat:
            begun = time.perf_counter()
            answers = ask_all(ask, prompts, batch)
            seconds, tokens = time.perf_counter() - begun, sum(len(answer.tokens) for answer in answers)
            steps = sum(answer.meta.get("spec_verify_ct", len(answer.tokens) - 1) for answer in answers)
            return Repeat(tokens / seconds, (tokens - len(answers)) / max(1, steps))

        # The warm-up leaves all prompts in the engine's cache.
        every = max((len(self.plan.timed(suite, batch)) for batch in self.plan.batches), default=None)
        return self.speeds(suite, f"{name} in SGLang", time_pass, bar, warm=every)
