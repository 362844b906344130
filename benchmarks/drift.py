"""The drift test on real requests: windows to a false alarm, and windows to see a fall of 10 %.

    python benchmarks/drift.py [--counts benchmarks/results/drift_requests.json] [--windows 200000]

Windows are resampled from the recorded requests of a real benchmark (tokens and verification steps of each, no text,
no model). The fall is made in two ways: `worse draft`: accepted tokens are lost at random; `other traffic`: requests
that the draft knows worse come more often. `at the bound`: no fall, but the true acceptance length is the lower bound
of the benchmark's; `moody`: every window is 5 % better or worse; `other half`: the reference
is one half of the requests and the windows are drawn from the other half, as a benchmark and the traffic after it
are.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import log
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from infra.drift.sequential import DriftTest, Reference, Statistic
from infra.files.atomic import write_atomically
from infra.processes.exit import run_main
from infra.provenance import git_sha, hardware
from infra.records.acceptance import RequestCounts

RESULTS = Path(__file__).parent / "results"
FALL, ARL, SEED = 0.10, 5000.0, 20261122
WINDOW_STEPS = (100, 250, 500, 1000, 2000)
SPLIT = 20_000
"""Windows of each division of the requests into halves."""
CHAIN = 5000
"""Windows after which a simulated deployment starts anew."""
BEFORE = 50
"""Windows without a fall before the fall."""
BLOCK = 4_000_000

Windows = NDArray[np.float64]
"""`[W, 2]` tokens and steps."""
Draw = Callable[[np.random.Generator, int], Windows]


class Unbounded(Reference):
    """A reference that takes its figure for exact: only to show what the bound is for."""

    @property
    def lower_bound(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.length


@dataclass(frozen=True)
class Traffic:
    """Requests `[N, 2]`, each drawn with its weight, and the number of requests in a window."""

    requests: Windows
    weights: NDArray[np.float64] | None
    per_window: int

    def draw(self, rng: np.random.Generator, windows: int) -> Windows:
        block = max(1, BLOCK // self.per_window)
        parts = []
        for start in range(0, windows, block):
            size = (min(block, windows - start), self.per_window)
            number = len(self.requests)
            chosen = rng.choice(number, size, p=self.weights)
            parts.append(self.requests[chosen].sum(axis=1))
        return np.concatenate(parts)

    def with_worse_draft(self, fall: float) -> Draw:
        """Accepted tokens are lost at random until the acceptance length has fallen by `fall`."""
        tokens, steps = self.requests.sum(axis=0)
        kept = 1 - fall * tokens / (tokens - steps)

        def draw(rng: np.random.Generator, windows: int) -> Windows:
            drawn = self.draw(rng, windows)
            accepted = np.maximum(drawn[:, 0] - drawn[:, 1], 0).astype(np.int64)
            return np.stack([drawn[:, 1] + rng.binomial(accepted, kept), drawn[:, 1]], axis=1)

        return draw

    def with_other_requests(self, fall: float) -> Draw:
        """Requests weighted by exp(-k x acceptance), so that the acceptance length falls by `fall`."""
        length = self.requests[:, 0].sum() / self.requests[:, 1].sum()
        residuals = self.requests[:, 0] - length * self.requests[:, 1]
        low, high = 0.0, 1.0
        for _ in range(100):
            half = (low + high) / 2
            weights = np.exp(-half * (residuals - residuals.min()))
            tokens, steps = weights @ self.requests
            low, high = (half, high) if tokens / steps > (1 - fall) * length else (low, half)
        return Traffic(self.requests, weights / weights.sum(), self.per_window).draw

    def with_moods(self, spread: float) -> Draw:
        """Every window leans towards requests that the draft knows better or worse: windows vary more than requests."""
        leaning = [self.with_other_requests(spread), Traffic(self.requests, self._better(spread), self.per_window).draw]

        def draw(rng: np.random.Generator, windows: int) -> Windows:
            mood = rng.integers(2, size=(windows, 1))
            return np.where(mood == 0, leaning[0](rng, windows), leaning[1](rng, windows))

        return draw

    def _better(self, rise: float) -> NDArray[np.float64]:
        mirrored = self.requests.copy()
        length = mirrored[:, 0].sum() / mirrored[:, 1].sum()
        residuals = mirrored[:, 0] - length * mirrored[:, 1]
        low, high = 0.0, 1.0
        for _ in range(100):
            half = (low + high) / 2
            weights = np.exp(half * (residuals - residuals.max()))
            tokens, steps = weights @ mirrored
            low, high = (half, high) if tokens / steps < (1 + rise) * length else (low, half)
        return weights / weights.sum()


def false_alarms(test: DriftTest, draw: Draw, windows: int, seed: int) -> dict[str, float | int | None]:
    """Alarms over many windows without a fall; after an alarm, and every so often, a deployment begins anew."""
    rng, alarms = np.random.default_rng(seed), 0
    for _ in range(windows // CHAIN):
        statistic = Statistic()
        for tokens, steps in draw(rng, CHAIN).tolist():
            statistic = test.after(statistic, tokens, steps)
            if test.alarms(statistic):
                alarms, statistic = alarms + 1, statistic.anew()
    seen = windows // CHAIN * CHAIN
    return {
        "windows": seen,
        "alarms": alarms,
        "average_run_length": round(seen / alarms) if alarms else None,
        "at_least_95": round(seen / (alarms + 1.645 * max(alarms, 1) ** 0.5 + 1.36)),
    }


def delays(test: DriftTest, before: Draw, after: Draw, repeats: int, seed: int) -> dict[str, float]:
    """Windows from the first one that has fallen to the alarm, itself counted."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(repeats):
        statistic = Statistic()
        for tokens, steps in before(rng, BEFORE).tolist():
            statistic = test.after(statistic, tokens, steps)
            if test.alarms(statistic):
                statistic = statistic.anew()
        for count, (tokens, steps) in enumerate(_endless(after, rng), start=1):
            statistic = test.after(statistic, tokens, steps)
            if test.alarms(statistic):
                found.append(count)
                break
    mean, median, late = np.mean(found), np.median(found), np.quantile(found, 0.95)
    return {"mean": round(float(mean), 2), "median": float(median), "p95": round(float(late), 1)}


def _endless(draw: Draw, rng: np.random.Generator) -> Iterator[list[float]]:
    while True:
        yield from draw(rng, 64).tolist()


def cusum_delays(test: DriftTest, before: Draw, after: Draw, arl: float, seed: int) -> dict[str, float]:
    """The same increments in a CUSUM whose threshold is calibrated at this window size to `arl` windows."""
    rng = np.random.default_rng(seed)

    def evidence(draw: Draw, chains: int, windows: int) -> NDArray[np.float64]:
        drawn = draw(rng, chains * windows)
        return (test.theta * (test.middle * drawn[:, 1] - drawn[:, 0])).reshape(chains, windows)

    def run(increments: NDArray[np.float64], start: NDArray[np.float64], threshold: float) -> tuple[int, list[int]]:
        value, alarms, first = start.copy(), 0, np.zeros(len(increments), dtype=int)
        for index, column in enumerate(increments.T, start=1):
            value = np.maximum(value, 0) + column
            over = value >= threshold
            first = np.where(over & (first == 0), index, first)
            alarms, value = alarms + int(over.sum()), np.where(over, 0.0, value)
        return alarms, first[first > 0].tolist()

    calm, begin = evidence(before, 400, 2500), np.zeros(400)
    low, high = 0.0, 2 * log(arl)
    for _ in range(12):
        half = (low + high) / 2
        low, high = (half, high) if calm.size < arl * max(run(calm, begin, half)[0], 1) else (low, half)
    warm = np.zeros(2000)
    for column in evidence(before, 2000, BEFORE).T:
        warm = np.maximum(warm, 0) + column
        warm = np.where(warm >= high, 0.0, warm)
    _, first = run(evidence(after, 2000, 400), warm, high)
    return {"threshold": round(high, 2), "mean": round(float(np.mean(first)), 2), "median": float(np.median(first))}


def other_half(requests: Windows, per_window: int, splits: int) -> dict[str, float]:
    """Reference from one half, windows from the other: with the lower bound, and taking the figure for exact."""
    alarms: dict[str, list[int]] = {"bound": [], "exact": []}
    for split in range(splits):
        order = np.random.default_rng([SEED, split]).permutation(len(requests))
        mine, theirs = requests[order[::2]], requests[order[1::2]]
        for name, kind in (("bound", Reference), ("exact", Unbounded)):
            test, traffic = DriftTest(kind(mine), FALL, ARL), Traffic(theirs, None, per_window)
            alarms[name].append(int(false_alarms(test, traffic.draw, SPLIT, split)["alarms"] or 0))
    return {
        "splits": splits,
        "windows_per_split": SPLIT,
        "average_run_length": round(splits * SPLIT / max(1, sum(alarms["bound"]))),
        "median_alarms_per_split": float(np.median(alarms["bound"])),
        "without_the_bound_average_run_length": round(splits * SPLIT / max(1, sum(alarms["exact"]))),
        "without_the_bound_median_alarms": float(np.median(alarms["exact"])),
    }


def measure(requests: Windows, steps: int, windows: int) -> dict[str, object]:
    """Everything at one window size."""
    per_window = max(1, round(steps / requests[:, 1].mean()))
    traffic = Traffic(requests, None, per_window)
    bounded, exact = DriftTest(Reference(requests), FALL, ARL), DriftTest(Unbounded(requests), FALL, ARL)
    worse, other = traffic.with_worse_draft(FALL), traffic.with_other_requests(FALL)
    at_the_bound = traffic.with_other_requests(1 - bounded.reference.lower_bound / bounded.reference.length)
    alarms = false_alarms(exact, traffic.draw, windows, SEED)
    matched = alarms["average_run_length"] or alarms["windows"]
    assert matched is not None
    return {
        "requests_per_window": per_window,
        "false_alarms": false_alarms(bounded, traffic.draw, windows, SEED),
        "false_alarms_at_the_bound": false_alarms(bounded, at_the_bound, windows, SEED),
        "false_alarms_in_moody_traffic": false_alarms(bounded, traffic.with_moods(0.05), windows, SEED),
        "delay_worse_draft": delays(bounded, traffic.draw, worse, 1000, SEED + 1),
        "delay_other_traffic": delays(bounded, traffic.draw, other, 1000, SEED + 1),
        "figure_taken_for_exact": {
            "false_alarms": alarms,
            "delay_worse_draft": delays(exact, traffic.draw, worse, 1000, SEED + 1),
            "cusum_of_the_same_run_length": cusum_delays(exact, traffic.draw, worse, matched, SEED + 2),
        },
        "other_half": other_half(requests, per_window, 20),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=Path, default=RESULTS / "drift_requests.json")
    parser.add_argument("--windows", type=int, default=200_000)
    parser.add_argument("--json", type=Path, default=RESULTS / "drift.json")
    options = parser.parse_args()
    counts: RequestCounts = RequestCounts.read(options.counts)
    lookahead = counts.conditions.lookahead
    found: dict[str, object] = {}
    for text, rows in (("greedy", counts.greedy[lookahead]), ("sampled", counts.sampled[lookahead])):
        # A request that ended with its first token adds to no window.
        reference = Reference.of([row for row in rows if row[1] > 0])
        by_size: dict[str, object] = {}
        for steps in WINDOW_STEPS:
            by_size[str(steps)] = measured = measure(reference.requests, steps, options.windows)
            print(text, steps, json.dumps(measured), flush=True)
        found[text] = {
            "acceptance_length": round(reference.length, 4),
            "lower_bound": round(reference.lower_bound, 4),
            "requests": len(reference.requests),
            "steps_per_request": round(float(reference.requests[:, 1].mean()), 1),
            "by_window_steps": by_size,
        }
    result = {
        "commit": git_sha(),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": hardware(),
        "seed": SEED,
        "fall": FALL,
        "stated_average_run_length_windows": ARL,
        "conditions": counts.conditions.model_dump(mode="json"),
        "found": found,
    }
    write_atomically(options.json, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    run_main(main)
