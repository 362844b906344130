"""A draft that follows its traffic: acceptance that a server reports while its users change the subject.

    SGLANG_PLATFORM=draftsmith_test_cpu python benchmarks/live_loop.py [--samples 800] [--rounds 4] [--seed 0]

The tiny target. A champion is trained on the docstrings of Python's library, and served by a real SGLang (greedily, by
the tests' kernels). Users ask for what such docstrings go on with, then, from one moment on, for what the language
reference goes on with. Rounds follow each other as the loop of docs/live.md has them: each learns from the requests of
that server, from the weights of the draft that is served, and the server gets what it has learned. For comparison the
same number of the same questions is answered beforehand, captured and learned as a recipe with `data.regeneration`
does (two passes), by a new draft.

Served acceptance is tokens per verification step, as SGLang counts them for every request. Every draft is also asked
the same questions, from which nothing is learned.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from machine import cpu_model
from prepared import capture_train_export
from transformers import PreTrainedTokenizerBase

from infra.files.atomic import write_atomically
from infra.files.run_folder import RunFolder
from infra.processes.exit import run_main
from infra.processes.process import Owner
from infra.provenance import git_sha, hardware
from infra.records.data_path import TargetRecord
from infra.sglang.command import ServerSpec, server_environment, serving_command
from infra.sglang.config import SGLangConfig
from infra.sglang.server import SGLangServer
from models.config.recipe import load_recipe
from models.data import python_docs
from models.data.tokenizer import read_tokenizer
from models.run import PreparedRun
from models.targets.prepare import prepare_target

RESULT = Path(__file__).parent / "results" / "live_loop.json"
RECIPE = Path(__file__).parents[1] / "recipes" / "tiny.yaml"
CHARACTERS, ANSWER, LONGEST = 120, 48, 160
LOOKAHEAD, USERS, ASKED, WINDOW = 4, 2, 150, 50
TRAIN_S = 3600.0


def subjects() -> dict[str, list[str]]:
    """The beginnings that users ask with: of docstrings, and of pieces of the language reference; a tenth of each is
    asked of every draft, and the rest may be learned."""
    found: dict[str, list[str]] = {"docstrings": [], "reference": [], "docstrings, asked": [], "reference, asked": []}
    for place, text in python_docs.documents():
        name = "reference" if place.startswith("topic ") else "docstrings"
        for start in range(0, max(1, len(text) - 2 * CHARACTERS), 2 * CHARACTERS):
            piece = text[start : start + CHARACTERS].strip()
            kept_apart = hashlib.sha256(piece.encode()).digest()[0] < 26
            found[name + ", asked" * kept_apart].append(piece)
    for name, pieces in found.items():
        found[name] = sorted(set(pieces), key=lambda piece: hashlib.sha256(piece.encode()).digest()[1:])
    return found


@dataclass
class Traffic:
    """What users were answered."""

    tokens: list[int] = field(default_factory=list)
    """Emitted by verification steps, of each request in order."""
    steps: list[int] = field(default_factory=list)

    def acceptance(self, first: int = 0) -> float:
        return round(sum(self.tokens[first:]) / sum(self.steps[first:]), 4)


class Service:
    """A server with one draft after the other, and its users."""

    def __init__(self, target: TargetRecord, folder: Path):
        self._target, self._folder = target, folder
        self._tokenizer: PreTrainedTokenizerBase = read_tokenizer(target.path)
        self.server: SGLangServer | None = None
        self.socket = folder / "live.sock"
        self.traffic, self._lock = Traffic(), threading.Lock()

    def serve(self, export: Path) -> None:
        """Start again, with this draft."""
        self.stop()
        arguments = [*load_recipe(RECIPE).draft.engine_arguments(LOOKAHEAD), "--sleep-on-idle"]
        arguments += ["--speculative-draft-model-path", str(export)]
        spec = ServerSpec(Path(self._target.path), "float32", LONGEST + 8, 8)
        environment = server_environment(SGLangConfig(), 1) | {"DRAFTSMITH_LIVE": str(self.socket)}
        command = partial(serving_command, spec, SGLangConfig(), arguments)
        self.server = SGLangServer(command, "served", Owner("live-loop", self._folder), environment, 300.0)

    def stop(self) -> None:
        if self.server is not None:
            self.server.stop()

    def ask(self, text: str, into: Traffic) -> None:
        """One request, counted. A server that is being started again is asked once more."""
        ids: Any = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        sampling = {"max_new_tokens": ANSWER, "temperature": 0.0, "ignore_eos": True}
        assert self.server is not None
        address = self.server.address
        answer = httpx.post(
            f"{address}/generate", json={"input_ids": ids, "sampling_params": sampling}, timeout=60.0, trust_env=False
        )
        meta = answer.raise_for_status().json()["meta_info"]
        with self._lock:
            into.tokens.append(meta["completion_tokens"] - 1)
            into.steps.append(meta["spec_verify_ct"])

    def measured(self, texts: Sequence[str]) -> float:
        """Acceptance of the same questions for every draft."""
        traffic = Traffic()
        for text in texts[:ASKED]:
            self.ask(text, traffic)
        return traffic.acceptance()

    @contextmanager
    def users(self, texts: Iterator[str]) -> Iterator[None]:
        """Users who ask as long as this lasts."""
        stop = threading.Event()

        def use() -> None:
            while not stop.is_set():
                with self._lock:
                    text = next(texts)
                self.ask(text, self.traffic)

        threads = [threading.Thread(target=use) for _ in range(USERS)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join(120)


def run_of(folder: Path, target: TargetRecord, overrides: Sequence[str], start: Path | None = None) -> RunFolder:
    """A run that is to be prepared."""
    run = RunFolder(folder)
    fixed = (f"data.max_tokens={LONGEST}", "training.heldout_steps=0")
    write_atomically(run.config, load_recipe(RECIPE, [*fixed, *overrides]))
    write_atomically(run.target, target)
    if start is not None:
        shutil.copytree(start, run.start)
    return run


def learned(run: RunFolder, *modules: str) -> dict[str, float]:
    """Run what prepares samples, then generator and trainer. Returns the processor time of all of it."""
    before, begun = sum(os.times()[2:4]), time.perf_counter()
    for module in modules:
        subprocess.run([sys.executable, "-m", module, str(run.path)], check=True, timeout=TRAIN_S)
    capture_train_export(PreparedRun.open(run.path), TRAIN_S)
    found = {"cpu_s": round(sum(os.times()[2:4]) - before, 1), "wall_s": round(time.perf_counter() - begun, 1)}
    with PreparedRun.open(run.path).open_ledger() as ledger:
        rates = ledger.capture_rates()
    return found | {"read_s": round(rates.prefill_s, 1), "tokens": rates.tokens}


def forever(texts: Sequence[str]) -> Iterator[str]:
    """Each in turn, with a number: nobody asks the same twice."""
    for turn in range(10**6):
        yield from (f"{turn} {text}" if turn else text for text in texts)


def offline(folder: Path, target: TargetRecord, texts: Sequence[str], samples: int, seed: int) -> RunFolder:
    """A run that answers questions first, and learns then."""
    source = folder.with_suffix(".jsonl")
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[: round(samples * 1.15)]))
    settings = json.dumps({"temperature": 0.0, "max_new_tokens": ANSWER, "prompt_tokens": LONGEST - ANSWER})
    overrides = [f"data.source={source}", f"data.regeneration={settings}", f"data.max_samples={samples}"]
    return run_of(folder, target, [*overrides, "data.overlong=truncate", f"seed={seed}"])


REGENERATED = ("models.regeneration.regenerate", "models.data.prepare")


def loop(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    target, texts = prepare_target(load_recipe(RECIPE).target), subjects()
    champion = offline(folder / "champion", target, texts["docstrings"], options.samples, options.seed)
    found: dict[str, Any] = {"champion": learned(champion, *REGENERATED)}
    other = offline(folder / "offline", target, texts["reference"], options.samples, options.seed)
    found["offline"] = learned(other, *REGENERATED)
    service = Service(target, folder)
    try:
        asked = texts["reference, asked"]
        service.serve(other.export)
        found["offline"]["acceptance"] = service.measured(asked)
        service.serve(champion.export)
        found["champion"] |= {
            "acceptance_before": service.measured(texts["docstrings, asked"]),
            "acceptance": service.measured(asked),
        }
        print(json.dumps(found), flush=True)
        found["rounds"], export, questions = [], champion.export, forever(texts["reference"])
        for number in range(options.rounds):
            first = len(service.traffic.steps)
            assert service.server is not None
            where = {"address": service.server.address, "socket": str(service.socket)}
            live = {
                "servers": [where],
                "consent": "a benchmark's own text",
                "retention_days": 1,
                "share": options.share,
                "patience_s": 0.2,  # its users never stop
            }
            overrides = [f"generator.live={json.dumps(live)}", "generator.engine=serving", "data.source=live"]
            overrides += [f"data.max_samples={options.samples // options.rounds}", "training.start_from=champion"]
            overrides += ["data.overlong=truncate", f"seed={options.seed + number}"]
            overrides += [f"training.learning_rate={options.learning_rate}"]
            run = run_of(folder / f"round-{number}", target, overrides, export)
            with service.users(questions):
                costs = learned(run, "models.capture.collect", "models.data.prepare")
            costs |= {"requests": len(service.traffic.steps), "served": service.traffic.acceptance(first)}
            export = run.export
            service.serve(export)
            found["rounds"].append(costs | {"acceptance": service.measured(asked)})
            print(json.dumps(found["rounds"][-1]), flush=True)
    finally:
        service.stop()
    steps, tokens = service.traffic.steps, service.traffic.tokens
    found["curve"] = [
        [first, round(sum(tokens[first : first + WINDOW]) / sum(steps[first : first + WINDOW]), 4)]
        for first in range(0, len(steps) - WINDOW + 1, WINDOW)
    ]
    found["recovered"] = round(found["rounds"][-1]["acceptance"] / found["offline"]["acceptance"], 4)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--samples", type=int, default=800, help="of the champion, of the offline draft, and of all rounds"
    )
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args()
    under = {
        "commit": git_sha(), "date": time.strftime("%Y-%m-%d"), "hardware": hardware(), "cpu": cpu_model(),
        "samples": options.samples, "share": options.share, "learning_rate": options.learning_rate,
        "lookahead": LOOKAHEAD,
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="live-loop-") as folder:
        found = under | loop(Path(folder), options)
    results = json.loads(options.json.read_text()) if options.json.is_file() else {}
    write_atomically(options.json, json.dumps(results | {f"seed {options.seed}": found}, indent=1) + "\n")
    print(f"recovered {found['recovered']:.1%} of the offline draft's acceptance", flush=True)


if __name__ == "__main__":
    run_main(main)
