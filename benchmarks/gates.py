"""A/A gates: how often promotion's gate replaces a draft by itself, and how often it sees a true gain.

    python benchmarks/gates.py [--records benchmarks/results/gate_records.json] [--gates 2000]

Each gate is `models.benchmark.gate.decide` as the benchmark calls it (the margin of 1 %; what a
margin of 0 would have said is counted beside it), on the recorded counts of real drafts (benchmarks/gate_records.py):
no model runs. Conversations are drawn from the recorded ones with replacement. Without a gain:

`the same draft, the same text`: the same counts on both sides, as a greedy benchmark of a draft against itself is.
`the same draft, text sampled again`: each side has one of the texts that the target sampled for a prompt, another than
    the other side has. Noise of the text is not paired away.
`the same draft, other conversations`: each side has conversations of its own. Nothing is paired: the harshest.
`another draft, the same text`: challenger and champion are of the same recipe with other seeds, over the same greedy
    texts, as in a retraining. The better one loses accepted tokens at random until both are worth the same.

With a gain: the last two, where the champion loses accepted tokens at random until the challenger's true
acceptance length is 2, 5 or 10 % above.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from infra.files.atomic import write_atomically
from infra.processes.exit import run_main
from infra.provenance import git_sha, hardware, versions
from infra.records.acceptance import Conditions, GateEvidence, Ground
from infra.records.data_path import Record
from models.benchmark.gate import decide
from models.config.benchmark import PromotionConfig

RESULTS = Path(__file__).parent / "results"
RECORDS = RESULTS / "gate_records.json"
CONVERSATIONS = (16, 32, 128, 200)
MANY = 100
"""A gate over this many takes a fifth of a second."""
GAINS = (0.02, 0.05, 0.10)
SEED = 20261122
CHAMPION = "itself"

Row = tuple[int, int]
Rows = NDArray[np.int64]
"""`[N, 2]` tokens and complete steps of conversations."""
Draw = Callable[[np.random.Generator, int], tuple[Rows, Rows]]
"""So many conversations of challenger and champion."""


class GateRecords(Record):
    """What a draft came to over texts of its target: (tokens, complete steps) of each prompt."""

    conditions: Conditions
    other_draft_revision: str
    seed: int
    greedy: tuple[Row, ...]
    other_greedy: tuple[Row, ...]
    """Of another draft, over the same texts."""
    sampled: tuple[tuple[Row, ...], ...]
    """By text: each prompt was continued so often."""


def paired(challenger: Rows, champion: Rows) -> Draw:
    """The same prompts on both sides; a prompt may have several texts (`[P, texts, 2]`), then each side has another."""

    def draw(rng: np.random.Generator, number: int) -> tuple[Rows, Rows]:
        chosen = rng.integers(len(challenger), size=number)
        if challenger.ndim == 2:
            return challenger[chosen], champion[chosen]
        texts = challenger.shape[1]
        one, apart = rng.integers(texts, size=number), rng.integers(1, texts, size=number)
        return challenger[chosen, one], champion[chosen, (one + apart) % texts]

    return draw


def unpaired(challenger: Rows, champion: Rows) -> Draw:
    """Each side has conversations of its own."""
    ours, theirs = challenger.reshape(-1, 2), champion.reshape(-1, 2)
    return lambda rng, number: (rng.choice(ours, number), rng.choice(theirs, number))


def with_gain(gain: float, challenger: Rows, champion: Rows, draw: Draw) -> Draw:
    """One side loses accepted tokens at random, until the challenger's true length is `1 + gain` the champion's."""
    lengths = [tokens / steps for tokens, steps in (rows.reshape(-1, 2).sum(axis=0) for rows in (challenger, champion))]
    wanted = min(lengths[0], lengths[1] * (1 + gain))
    kept = [(want - 1) / (is_now - 1) for want, is_now in zip((wanted, wanted / (1 + gain)), lengths, strict=True)]

    def drawn(rng: np.random.Generator, number: int) -> tuple[Rows, Rows]:
        thinned = []
        for rows, keep in zip(draw(rng, number), kept, strict=True):
            accepted = rng.binomial(rows[:, 0] - rows[:, 1], keep)
            thinned.append(np.stack([rows[:, 1] + accepted, rows[:, 1]], axis=1))
        return thinned[0], thinned[1]

    return drawn


def evidence_of(challenger: Rows, champion: Rows, promotion: PromotionConfig) -> GateEvidence:
    """Nothing but the acceptance length is to decide."""
    ours, theirs = (tuple((tokens, steps) for tokens, steps in rows.tolist()) for rows in (challenger, champion))
    ground = Ground(name="recorded", dataset_hash="", margin=promotion.margin, challenger=ours, champion=theirs)
    return GateEvidence(
        champion_label=CHAMPION,
        lookahead=4,
        max_gap=promotion.max_gap,
        min_distinct_token_share=0.05,
        distinct_token_share=1.0,
        mismatches=0,
        gap=0.0,
        grounds=(ground,),
    )


def hold_gates(draw: Draw, number: int, gates: int) -> dict[str, float]:
    """Run `gates` gates; return how many promoted, with the margin and without."""
    promotion, promoted, without, differences, detectable = PromotionConfig(), 0, 0, [], []
    for gate in range(gates):
        rng = np.random.default_rng([SEED, number, gate])
        decision = decide(evidence_of(*draw(rng, number), promotion))
        assert decision.against == CHAMPION  # better than no draft beyond doubt, so the champion decides
        promoted += decision.passed
        without += decision.lower_bound > 0
        differences.append(decision.difference)
        detectable.append(decision.smallest_detectable)
    return {
        "gates": gates,
        "promoted": promoted,
        "share": round(promoted / gates, 4),
        "share_at_margin_0": round(without / gates, 4),
        "spread_of_the_difference": round(float(np.std(differences)), 4),
        "smallest_detectable_median": round(float(np.median(detectable)), 4),
    }


def cells(records: GateRecords, gates: int, few: int) -> dict[str, tuple[Draw, int]]:
    """What is held, by name, and how many gates of it."""
    greedy, other = np.array(records.greedy), np.array(records.other_greedy)
    sampled = np.array(records.sampled).swapaxes(0, 1)
    found = {
        # Every gate is the same: no need of many.
        "the same draft, the same text": (paired(greedy, greedy), few),
        "the same draft, text sampled again": (paired(sampled, sampled), gates),
        "the same draft, other conversations, sampled": (unpaired(sampled, sampled), gates),
        "the same draft, other conversations, greedy": (unpaired(greedy, greedy), gates),
    }
    for gain in (0.0, *GAINS):
        name, number = (f"a gain of {gain:.0%}", few) if gain else ("no gain", gates)
        found[f"another draft, the same text: {name}"] = (
            with_gain(gain, greedy, other, paired(greedy, other)), number,
        )  # fmt: skip
        if gain:
            found[f"other conversations, greedy: {name}"] = (
                with_gain(gain, greedy, greedy, unpaired(greedy, greedy)), number,
            )  # fmt: skip
    return found


def length(rows: tuple[Row, ...]) -> float:
    tokens, steps = np.array(rows).sum(axis=0)
    return round(float(tokens / steps), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument("--gates", type=int, default=2000, help="of a cell without a gain")
    parser.add_argument("--few-gates", type=int, default=400, help="of one with a gain, or with many conversations")
    parser.add_argument("--json", type=Path, default=RESULTS / "gates.json")
    options = parser.parse_args()
    begun, cpu = time.perf_counter(), time.process_time()
    records: GateRecords = GateRecords.read(options.records)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, (draw, gates) in cells(records, options.gates, options.few_gates).items():
        for number in CONVERSATIONS:
            held = gates if number < MANY else min(gates, options.few_gates)
            cell = hold_gates(draw, number, held)
            found.setdefault(name, {})[str(number)] = cell
            print(f"{name}, {number} conversations: {json.dumps(cell)}", flush=True)
    result = {
        "commit": git_sha(),
        "date": time.strftime("%Y-%m-%d"),
        "hardware": hardware(),
        "versions": versions() | {"numpy": np.__version__},
        "seed": SEED,
        "promotion": PromotionConfig().model_dump(mode="json"),
        "conditions": records.conditions.model_dump(mode="json"),
        "other_draft_revision": records.other_draft_revision,
        "acceptance_length": {
            "greedy": length(records.greedy),
            "other draft, greedy": length(records.other_greedy),
            "sampled": [length(text) for text in records.sampled],
        },
        "by_conversations": found,
        "wall_s": round(time.perf_counter() - begun),
        "cpu_s": round(time.process_time() - cpu),
    }
    write_atomically(options.json, json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    run_main(main)
