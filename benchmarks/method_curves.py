"""How far draft methods get with how much text: acceptance length against training tokens, trained from scratch each.

    python benchmarks/method_curves.py [--target tiny] [--samples 375 750 1500 3000] [--seeds 0] [--methods EAGLE-3 ...]

Text, prompts, drafts and measurement are those of `methods.py`. Each method has one learning rate, the best of its
trials there. Writes benchmarks/results/method-curves-TARGET.json and a Markdown table beside it; stopped, it goes on
with what is missing.
"""

import argparse
import time
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from methods import RECIPES, Cells, Ground, add_walk_arguments
from methods_table import write_curves

from infra.processes.exit import run_main
from models.targets.tiny import one_thread

RATES = {"EAGLE-3": 1.0, "DFlash": 2.0, "DSpark": 2.0, "DSpark, KL": 2.0}
"""Learning rates in shares of the recipe's."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=list(RECIPES), default="tiny")
    parser.add_argument("--samples", type=int, nargs="+", default=[375, 750, 1500, 3000])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--methods", nargs="+", choices=list(RATES), default=list(RATES))
    add_walk_arguments(parser)
    options = parser.parse_args()
    result = options.results / f"method-curves-{options.target}.json"
    with one_thread(), TemporaryDirectory(prefix="curves-") as folder:
        ground = Ground(options.target, max(options.samples), options, Path(folder))
        cells = Cells(result.with_suffix(".part.json"), ground.settings() | {"rates": RATES})
        # Seeds change last, so that one whole curve is there soon.
        for seed, samples, method in product(options.seeds, options.samples, options.methods):
            if (name := f"{method}, {samples} samples, seed {seed}") not in cells.done:
                begun, trial = time.perf_counter(), ground.trial(method, RATES[method], samples, seed)
                about = {"method": method, "samples": samples, "seed": seed}
                cells.keep(name, about | trial, time.perf_counter() - begun)
        write_curves(result, ground.about() | cells.settings, cells.done)
    cells.path.unlink()
    print(result.with_suffix(".md").read_text())


if __name__ == "__main__":
    run_main(main)
