"""Memory and speed of preparing many synthetic conversations, and what a kill in the middle costs.

    python benchmarks/preparation.py [--conversations 1000000] [--target gemma3-270m] [--json ...]

Conversations of about 500 tokens are written to a JSON Lines file, prepared until half of their parts are there, killed
(all processes), and prepared again to the end. Peak memory is of one process, as the kernel counts it.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import cpu_model

from infra.files.atomic import write_atomically
from infra.processes.exit import run_main
from infra.provenance import git_sha, hardware
from models.config.recipe import load_recipe
from models.data.parts import PARTS
from models.data.prepare import prepare_samples
from models.targets.prepare import prepare_target

RESULT = Path(__file__).parent / "results" / "preparation.json"
RECIPES = {"tiny": "tiny", "gemma3-270m": "quickstart"}
SYLLABLES = [
    "ba",
    "de",
    "ki",
    "lo",
    "mu",
    "na",
    "pe",
    "ri",
    "so",
    "tu",
    "va",
    "we",
    "xi",
    "yo",
    "zu",
    "cha",
    "the",
    "ing",
    "er",
    "on",
    "al",
    "st",
]
WAIT_S = 7200.0


def write_source(path: Path, count: int) -> None:
    """`count` conversations of two exchanges."""
    dice = random.Random(0)
    words = ["".join(dice.choices(SYLLABLES, k=dice.randint(1, 3))) for _ in range(20_000)]
    with path.open("w") as file:
        for _ in range(count):
            turns = [
                {"role": role, "content": " ".join(dice.choices(words, k=dice.randint(*length)))}
                for role, length in (("user", (5, 40)), ("assistant", (80, 184))) * 2
            ]
            file.write(json.dumps({"messages": turns}) + "\n")


def prepare(target: str, source: str) -> None:
    """The process whose memory is measured."""
    config = load_recipe(
        Path(__file__).parents[1] / "recipes" / f"{RECIPES[target]}.yaml",
        [f"data.source={source}", "data.max_tokens=2048", "data.max_samples=null", "data.regeneration=null"],
    )
    begun = time.perf_counter()
    record = prepare_samples(config.data, prepare_target(config.target), config.target.add_bos)
    mine, theirs = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(
        json.dumps(
            {
                "wall_s": round(time.perf_counter() - begun, 1),
                "cpu_s": round(sum((*mine[:2], *theirs[:2])), 1),
                "peak_mib": round(mine.ru_maxrss / 1024),
                "peak_mib_of_a_helper": round(theirs.ru_maxrss / 1024),
                "samples": record.train_samples + record.heldout_samples,
                "tokens": record.train_tokens,
                "hash": record.dataset_hash,
            }
        )
    )


def killed_at(command: list[str], cache: Path, parts: int) -> int:
    """Start a preparation and kill it as soon as it has made `parts` parts. Returns the number that it had made."""
    process = subprocess.Popen(command, start_new_session=True, env=os.environ | {"DRAFTSMITH_CACHE": str(cache)})
    deadline = time.monotonic() + WAIT_S
    while (there := len(list(cache.glob(f"samples/.*{PARTS}/[0-9]*.npz")))) < parts:
        assert process.poll() is None, "it ended before it was killed"
        assert time.monotonic() < deadline
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(60)
    return there


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=1_000_000)
    parser.add_argument("--target", choices=list(RECIPES), default="gemma3-270m")
    parser.add_argument("--json", type=Path, default=RESULT)
    parser.add_argument("--prepare", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.prepare:
        prepare(options.target, options.prepare)
        return
    folder = Path(tempfile.mkdtemp(prefix="preparation-"))
    source, cache = folder / "conversations.jsonl", folder / "cache"
    write_source(source, options.conversations)
    print(f"{source.stat().st_size / 2**30:.2f} GiB of conversations", flush=True)
    # Targets are where they always are.
    (cache / "samples").mkdir(parents=True)
    (cache / "targets").symlink_to(Path.home() / ".cache" / "draftsmith" / "targets")
    command = [sys.executable, __file__, "--target", options.target, "--prepare", str(source)]
    half = options.conversations // 512
    kept = killed_at(command, cache, half)
    begun = time.time()
    ended = subprocess.run(
        command, env=os.environ | {"DRAFTSMITH_CACHE": str(cache)}, capture_output=True, text=True, timeout=WAIT_S,
        check=True,
    )  # fmt: skip
    found = json.loads(ended.stdout.splitlines()[-1])
    result = {
        "commit": git_sha(), "date": time.strftime("%Y-%m-%d"), "hardware": hardware(), "cpu": cpu_model(),
        "target": options.target, "conversations": options.conversations, "parts_before_the_kill": kept,
        "resumed_wall_s": round(time.time() - begun, 1), **found,
    }  # fmt: skip
    shutil.rmtree(folder)
    write_atomically(options.json, json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    run_main(main)
