"""Whether the walk over sampled text equals real speculative sampling in law, and how much surer it is at equal cost.

    python benchmarks/sampled_walk.py RUN [--steps 25200]

RUN is a finished run whose target fits the reference decoder. For every temperature, top-p and proposal rule (the draft
proposes its likeliest tokens, or draws them), the first held-out prompts are continued again and again: by real
decoding at lookahead 1 to 7, and by the target alone for the walk, which gives all lookaheads at once.

Compared is acceptance by position at each lookahead, by one chi-square with a degree of freedom for each position that
at least 50 steps came to, of which 5 accepted. Steps of a text are not independent, so covariances come from whole
texts, centred by prompt. `wrong_ratio_p` is the same test of walks that are wrong on purpose: min(1, p / q), and q
alone. `efficiency` compares standard errors of the acceptance length at equal CPU time, continuations included: `one`
for this figure alone, `all` for all lookaheads and both rules, which one walk gives together. `one_by_one` compares, at
lookahead 4, with real decoding of one text at a time.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import chdtrc

from infra.files.atomic import write_atomically
from infra.processes.exit import run_main
from infra.provenance import git_sha, hardware, versions
from models.benchmark.contestants import Contestants, load_contestants
from models.data.prompts import heldout_prompts
from models.decoding import sampled_walk
from models.decoding.acceptance import Counts
from models.decoding.continuations import continue_batch
from models.decoding.sampled_walk import SampledWalk, walk_sampled
from models.decoding.simulated import read_texts
from models.decoding.speculative import speculate_together
from models.drafts.certain import ProposesCertainly
from models.drafts.sampling import Sampling
from models.dtypes import DTYPES
from models.run import PreparedRun

RESULTS = Path(__file__).parent / "results"
SEED, LOOKAHEADS, NEVER = 20261124, 7, frozenset[int]()
LAWS = ((0.6, 0.9), (1.0, 0.9))
"""Temperature and top-p."""
LEAST_STEPS, LEAST_ACCEPTED = 50, 5
RULES = ("greedy", "drawn")
Ratio = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class Texts:
    """Counts of many texts at one lookahead: accepted and offered by position, with each text's prompt."""

    lookahead: int
    rows: list[list[float]] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    lengths: list[tuple[float, float]] = field(default_factory=list)
    cpu_s: float = 0.0

    def add(self, counts: Counts, prompt: int) -> None:
        """One text's counts."""
        pairs = [counts.at_position(position) for position in range(1, self.lookahead + 1)]
        self.rows.append([pair[0] for pair in pairs] + [pair[1] for pair in pairs])
        self.lengths.append((counts.tokens, counts.steps))
        self.prompts.append(prompt)

    @property
    def steps(self) -> float:
        return sum(steps for _, steps in self.lengths)

    def rates(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Acceptance by position `[L]`, and its covariance `[L, L]`."""
        accepted, offered = np.split(np.array(self.rows), 2, axis=1)
        steps = np.maximum(offered.sum(axis=0), 1e-9)
        found = accepted.sum(axis=0) / steps
        return found, covariance((accepted - found * offered) / steps, self.prompts)

    def enough(self) -> NDArray[np.bool_]:
        """Which positions `[L]` enough steps came to."""
        accepted, offered = np.split(np.array(self.rows).sum(axis=0), 2)
        return (offered >= LEAST_STEPS) & (accepted >= LEAST_ACCEPTED)

    def length(self) -> tuple[float, float]:
        """Acceptance length and its standard error."""
        rows = np.array(self.lengths)
        tokens, steps = rows.sum(axis=0)
        spread = covariance(((rows[:, 0] - tokens / steps * rows[:, 1]) / steps)[:, None], self.prompts)
        return float(tokens / steps), float(spread[0, 0] ** 0.5)


def covariance(parts: NDArray[np.float64], prompts: Sequence[int]) -> NDArray[np.float64]:
    """`[L, L]` covariance of a sum of independent rows `[n, L]`; what differs between prompts is on both sides."""
    found = np.zeros((parts.shape[1], parts.shape[1]))
    groups = np.array(prompts)
    for prompt in np.unique(groups):
        own = parts[groups == prompt]
        centred = own - own.mean(axis=0)
        found += centred.T @ centred * len(own) / (len(own) - 1)
    return found


def p_value(real: Texts, walked: Texts) -> float:
    """Chi-square of acceptance by position, real against walked."""
    (one, spread), (other, more) = real.rates(), walked.rates()
    kept = real.enough() & walked.enough()
    difference, covered = (one - other)[kept], (spread + more)[np.ix_(kept, kept)]
    return float(chdtrc(kept.sum(), difference @ np.linalg.solve(covered, difference)))


@dataclass(frozen=True)
class Setting:
    """What is decoded and walked, and by which law."""

    loaded: Contestants
    prompts: Sequence[list[int]]
    sampling: Sampling
    max_new_tokens: int
    together: int

    def decode(self, rule: str, lookahead: int, steps: float) -> Texts:
        """Decode for real until `steps` steps are counted, each prompt equally often."""
        draft = self.loaded.draft
        source = draft if rule == "drawn" else ProposesCertainly(draft)
        found, begun = Texts(lookahead), time.process_time()
        while found.steps < steps:
            for index, prompt in enumerate(self.prompts):
                texts = speculate_together(
                    self.loaded.target, source, [prompt] * self.together, lookahead, self.max_new_tokens, NEVER,
                    sampling=self.sampling,
                )  # fmt: skip
                for text in texts:
                    found.add(text.counts, index)
        found.cpu_s = time.process_time() - begun
        return found

    def walk(self, texts: int) -> dict[str, list[Texts]]:
        """Walk over several of the target's own texts per prompt; counts by rule and lookahead."""
        found = {rule: [Texts(lookahead) for lookahead in range(1, LOOKAHEADS + 1)] for rule in RULES}
        begun = time.process_time()
        for index, prompt in enumerate(self.prompts):
            own = continue_batch(
                self.loaded.target, [prompt] * texts, self.max_new_tokens, NEVER, self.sampling,
                batch_size=self.together,
            )  # fmt: skip
            for first in range(0, texts, self.together):
                for walked in self._walk_some(prompt, own[first : first + self.together]):
                    for rule, counts in zip(RULES, (walked.greedy, walked.drawn), strict=True):
                        for each, of in zip(found[rule], counts, strict=True):
                            each.add(of, index)
        for each in (each for of in found.values() for each in of):
            each.cpu_s = time.process_time() - begun
        return found

    def _walk_some(self, prompt: list[int], texts: Sequence[list[int]]) -> list[SampledWalk]:
        whole, sampled = [[*prompt, *text] for text in texts], [len(text) - 1 for text in texts]
        readings = read_texts(self.loaded.target, whole, sampled=sampled, sampling=self.sampling)
        return walk_sampled(self.loaded.draft, readings, LOOKAHEADS, self.sampling, eos_ids=self.loaded.eos_ids)


def upside_down(q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """A wrong ratio: what decides of a proposal before it is known whether it is emitted."""
    return (p / q).nan_to_num(0).clamp(max=1)


def draft_alone(q: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """A wrong ratio: the draft's probability of the text."""
    return q


WRONG: Mapping[str, Ratio] = {"min(1, p/q)": upside_down, "q": draft_alone}


@contextmanager
def deciding_by(ratio: Ratio) -> Iterator[None]:
    """Walk by another ratio for a while."""
    right, sampled_walk.acceptance_chances = sampled_walk.acceptance_chances, ratio
    try:
        yield
    finally:
        sampled_walk.acceptance_chances = right


def compare(real: Texts, walked: Texts) -> dict[str, Any]:
    """What one lookahead came to."""
    (length, error), (other, surer) = real.length(), walked.length()
    # Errors fall with the square root of the time.
    alone = error / surer * (real.cpu_s / walked.cpu_s) ** 0.5
    return {
        "p": round(p_value(real, walked), 4),
        "real": {"steps": round(real.steps), "texts": len(real.rows), "length": round(length, 4),
                 "standard_error": round(error, 5), "by_position": real.rates()[0].round(4).tolist(),
                 "cpu_s": round(real.cpu_s, 1)},
        "walk": {"texts": len(walked.rows), "length": round(other, 4), "standard_error": round(surer, 5),
                 "by_position": walked.rates()[0].round(4).tolist(), "cpu_s": round(walked.cpu_s, 1)},
        "efficiency": {"one": round(alone, 2), "all": round(alone * (LOOKAHEADS * len(RULES)) ** 0.5, 2)},
    }  # fmt: skip


def measured(
    loaded: Contestants, prompts: Sequence[list[int]], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Every law, rule and lookahead."""
    for temperature, top_p in LAWS:
        sampling = Sampling(temperature, top_p, torch.Generator().manual_seed(SEED))
        setting = Setting(loaded, prompts, sampling, options.max_new_tokens, options.together)
        walked, wrong = setting.walk(options.texts), {}
        for name, ratio in WRONG.items():
            with deciding_by(ratio):
                wrong[name] = setting.walk(options.texts // 4)["drawn"]
        for rule in RULES:
            for lookahead in range(1, LOOKAHEADS + 1):
                real = setting.decode(rule, lookahead, options.steps / LOOKAHEADS)
                found = compare(real, walked[rule][lookahead - 1])
                if rule == "drawn":
                    found["wrong_ratio_p"] = {name: p_value(real, of[lookahead - 1]) for name, of in wrong.items()}
                if lookahead == 4:
                    slow = replace(setting, together=1).decode(rule, lookahead, options.one_by_one)
                    found["one_by_one"] = compare(slow, walked[rule][lookahead - 1])
                yield {"temperature": temperature, "top_p": top_p, "proposals": rule, "lookahead": lookahead} | found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument(
        "--steps", type=int, default=25_200, help="of real decoding, of a law and rule, over all lookaheads"
    )
    parser.add_argument("--one-by-one", type=int, default=800, help="steps of decoding one text at a time")
    parser.add_argument("--texts", type=int, default=128, help="walked, of each prompt")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=32)
    parser.add_argument("--together", type=int, default=64)
    parser.add_argument("--json", type=Path, default=RESULTS / "sampled_walk.json")
    options = parser.parse_args()
    run, begun = PreparedRun.open(options.run), time.perf_counter()
    prompts = heldout_prompts(run.open_samples("heldout"), run.config.benchmark)[: options.prompts]
    loaded = load_contestants(Path(run.target.path), [run.folder.export], DTYPES[run.config.benchmark_dtype])
    cells = []
    for cell in measured(loaded, prompts, options):
        cells.append(cell)
        print(json.dumps(cell), flush=True)
    result = {
        "commit": git_sha(),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": hardware(),
        "versions": versions(),
        "target": run.target.name,
        "seed": SEED,
        "prompts": len(prompts),
        "max_new_tokens": options.max_new_tokens,
        "smallest_p": min(cell["p"] for cell in cells),
        "smallest_efficiency": {of: min(cell["efficiency"][of] for cell in cells) for of in ("one", "all")},
        "cells": cells,
        "wall_s": round(time.perf_counter() - begun),
    }
    write_atomically(options.json, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    run_main(main)
