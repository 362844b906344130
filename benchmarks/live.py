"""What learning from a server's users costs them: latency and throughput with and without a run that learns.

Real SGLang servers of one target on the CPU. Users ask at random moments (Poisson), for answers of random length; each
server is asked the same at the same moments, one server after the other in an order that rotates, so that a round's
figures are paired:

    off    as an operator starts it
    on     started with $DRAFTSMITH_LIVE, and a generator that takes a share of the requests and throws the objects away
    full   the same with a store that has no room: what the generator asks for is never written

With `--draft` all of them speculate (greedily, with the tests' kernels: SGLang has none for a CPU), with a draft that
nobody trained; without, `on` and `full` also keep hidden states for whoever asks (--enable-return-aux-hidden-states).

    python benchmarks/live.py [--targets tiny] [--draft] [--rounds 6] [--round-s 60] [--rate 6] [--share 0.05]
"""

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import torch
from machine import cpu_model
from prepared import prepared_run

from infra.files.atomic import write_atomically
from infra.files.run_folder import RunFolder
from infra.processes.exit import run_main
from infra.processes.process import Owner
from infra.provenance import git_sha, hardware
from infra.sglang.command import ServerSpec, server_environment, serving_command
from infra.sglang.config import SGLangConfig
from infra.sglang.server import SGLangServer
from models.capture.engine import EngineError
from models.capture.sglang.serving import ServingEngine
from models.config.recipe import load_recipe
from models.drafts.registry import build_draft
from models.drafts.vocabulary import DraftVocabulary
from models.export.served_target import read_served_target
from models.export.sglang import write_export
from models.run import PreparedRun
from models.targets.weights import read_target_head

RESULT = Path(__file__).parent / "results" / "live.json"
RECIPES = {"tiny": "tiny", "gemma3-270m": "quickstart"}
PROMPT, LONGEST, THREADS = 64, 200, 64
ANSWERS = (16, 112)
RESAMPLES = 2000
SHIFTS = 20
"""Prompts from one text: no two are the same, and a prefix cache is of no use."""
SMALL = 'mount -t tmpfs -o size={} none "$0" && exec "$@"'


@dataclass(frozen=True)
class Round:
    """What users saw in one round, and what it cost the server."""

    seconds: list[float]
    """Of every request."""
    wall_s: float
    cpu_s: float
    """Of the server's processes."""

    @property
    def told(self) -> dict[str, float]:
        figures = figures_of([self])
        return {name: round(value, 4) for name, value in figures.items()}


def figures_of(rounds: Sequence[Round]) -> dict[str, float]:
    """What is compared, over these rounds together."""
    seconds = [value for one in rounds for value in one.seconds]
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {
        "requests_per_s": len(seconds) / sum(one.wall_s for one in rounds),
        "p50_s": cuts[49],
        "p99_s": cuts[98],
        "mean_s": statistics.fmean(seconds),
        "cpu_s_per_request": sum(one.cpu_s for one in rounds) / len(seconds),
    }


def ratios(mine: Sequence[Round], theirs: Sequence[Round]) -> dict[str, list[float]]:
    """Of every figure: mine by theirs, and the 95 % interval by bootstrap over rounds, which are paired."""
    drawn = random.Random(0)
    whole = {name: value / figures_of(theirs)[name] for name, value in figures_of(mine).items()}
    many: dict[str, list[float]] = {name: [] for name in whole}
    for _ in range(RESAMPLES):
        chosen = drawn.choices(range(len(mine)), k=len(mine))
        other = figures_of([theirs[at] for at in chosen])
        for name, value in figures_of([mine[at] for at in chosen]).items():
            many[name].append(value / other[name])
    return {
        name: [round(value, 4) for value in (whole[name], *np.quantile(values, (0.025, 0.975)).tolist())]
        for name, values in many.items()
    }


def cpu_s(server: SGLangServer) -> float:
    """Processor seconds of all of a server's processes."""
    root = psutil.Process(server.process.pid)
    return sum(sum(one.cpu_times()[:2]) for one in (root, *root.children(recursive=True)))


def use(address: str, prompts: list[list[int]], seed: int, options: argparse.Namespace) -> tuple[list[float], float]:
    """Seconds of every request of a round, and until the last was answered. A seed's requests are always the same."""
    drawn = torch.Generator().manual_seed(seed)
    gaps = torch.empty(10_000).exponential_(options.rate, generator=drawn)
    starts = [at for at in gaps.cumsum(0).tolist() if at < options.round_s]
    answers = torch.randint(ANSWERS[0], ANSWERS[1] + 1, (len(starts),), generator=drawn).tolist()
    begun, client = time.perf_counter(), httpx.Client(base_url=address, timeout=300.0, trust_env=False)

    def one(index: int) -> float:
        time.sleep(max(0.0, begun + starts[index] - time.perf_counter()))
        asked = time.perf_counter()
        sampling = {"max_new_tokens": answers[index], "temperature": 0.0, "ignore_eos": True}
        body = {"input_ids": prompts[(seed * 1000 + index) % len(prompts)], "sampling_params": sampling}
        client.post("/generate", json=body).raise_for_status()
        return time.perf_counter() - asked

    with client, ThreadPoolExecutor(THREADS) as threads:
        seconds = list(threads.map(one, range(len(starts))))
    return seconds, time.perf_counter() - begun


@contextmanager
def learning(run: PreparedRun, counts: list[int]) -> Iterator[None]:
    """A process that captures until the end; adds to `counts` how many texts."""
    command = [sys.executable, __file__, "--learn", str(run.folder.path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        while "attached" not in (line := process.stdout.readline()):
            assert line, "the generator ended"
        yield
    finally:
        process.terminate()
        output, _ = process.communicate(timeout=120)
        counts.append(output.count("captured one"))


def learn(path: Path) -> None:
    """What `learning` starts: throws away what it captures."""
    run = PreparedRun.open(path)
    engine, serial = ServingEngine(run, 0), count()
    signal.signal(signal.SIGTERM, lambda *_: engine.interrupt())
    print("attached", flush=True)
    with closing(engine), suppress(EngineError):
        while True:
            captured = engine.answer(f"{run.folder.name}/0/{next(serial)}/1", torch.empty(0), LONGEST)
            engine.transport.delete(captured.record.key)
            print("captured one", flush=True)


def server_of(
    name: str, run: PreparedRun, folder: Path, arguments: list[str], live: bool, wrapped: list[str]
) -> SGLangServer:
    """A server with users."""
    spec = ServerSpec(Path(run.target.path), run.config.capture_dtype, LONGEST + 8, 8)

    def command(port: int) -> list[str]:
        return [*wrapped, *serving_command(spec, SGLangConfig(), [*arguments, "--sleep-on-idle"], port)]

    environment = server_environment(SGLangConfig(), 1) | {"SGLANG_PLATFORM": "draftsmith_test_cpu"}
    environment |= {"DRAFTSMITH_LIVE": str(folder / f"{name}.sock")} if live else {}
    return SGLangServer(command, name, Owner("live", folder), environment, 300.0)


def speculation(run: PreparedRun, folder: Path) -> list[str]:
    """Arguments of a draft that nobody trained."""
    target = Path(run.target.path)
    head = read_target_head(target, torch.float32)
    whole = DraftVocabulary.by_frequency(torch.ones(len(head.embedding)), len(head.embedding))
    draft = build_draft(run.config.draft, head.embedding, whole, run.config.target.aux_layer_ids)
    write_export(draft, folder / "export", {}, read_served_target(target))
    return [*run.config.draft.engine_arguments(3), "--speculative-draft-model-path", str(folder / "export")]


def measure(target: str, options: argparse.Namespace) -> dict[str, Any]:
    """All rounds of one target."""
    recipe = Path(__file__).parents[1] / "recipes" / f"{RECIPES[target]}.yaml"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="live-")))
        prepared: Callable[..., Any] = partial(prepared_run, recipe=recipe)
        plain = stack.enter_context(prepared(folder / "plain", overrides=["data.max_tokens=128"]))
        samples = plain.open_samples()
        long_enough = [at for at, length in enumerate(samples.lengths.tolist()) if length >= PROMPT + SHIFTS]
        texts = [samples[at].tokens.tolist() for at in long_enough]
        prompts = [text[shift : shift + PROMPT] for shift in range(SHIFTS) for text in texts]
        drafts = speculation(plain, folder) if options.draft else []
        layers = ["--return-aux-hidden-state-layer-ids", *map(str, plain.config.target.aux_layer_ids)]
        keeps = drafts or ["--enable-return-aux-hidden-states", "--speculative-algorithm", "EAGLE3", *layers]
        small = folder / "small"
        small.mkdir()
        inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", SMALL.format("16k"), str(small)]
        servers = {
            "off": server_of("off", plain, folder, drafts, False, []),
            "on": server_of("on", plain, folder, keeps, True, []),
            "full": server_of("full", plain, folder, keeps, True, inside),
        }
        for server in servers.values():
            stack.callback(server.stop)
        runs = {}
        for name in ("on", "full"):
            where = {"address": servers[name].address, "socket": str(folder / f"{name}.sock")}
            live = {
                "servers": [where],
                "consent": "a benchmark's own text",
                "retention_days": 1,
                "share": options.share,
            }
            overrides = ["generator.engine=serving", f"generator.live={json.dumps(live)}", "data.source=live"]
            overrides += ["data.max_samples=100", f"data.max_tokens={LONGEST}", "data.overlong=truncate"]
            overrides += ["training.start_from=champion"]
            if name == "full":
                overrides += ["transport.kind=files", f"transport.folder={small}"]
            runs[name] = plain_with(plain, folder / f"{name}-run", recipe, overrides)
        return rounds(servers, runs, prompts, options)


def rounds(
    servers: dict[str, SGLangServer],
    runs: dict[str, PreparedRun],
    prompts: list[list[int]],
    options: argparse.Namespace,
) -> dict[str, Any]:
    """What users of each server saw, and the ratios to `off`."""
    done: dict[str, list[Round]] = {name: [] for name in servers}
    counts: dict[str, list[int]] = {name: [] for name in servers}
    for server in servers.values():
        use(server.address, prompts, 10**6, argparse.Namespace(rate=options.rate, round_s=10.0))  # warm
    names = list(servers)
    for number in range(options.rounds):
        # Nobody is always first.
        for name in names[number % len(names) :] + names[: number % len(names)]:
            with learning(runs[name], counts[name]) if name in runs else nullcontext():
                before = cpu_s(servers[name])
                seconds, wall_s = use(servers[name].address, prompts, number, options)
                done[name].append(Round(seconds, wall_s, cpu_s(servers[name]) - before))
            print(f"round {number} {name}: {done[name][-1].told}, {sum(counts[name][-1:])} captured", flush=True)
    found: dict[str, Any] = {
        name: {"requests": sum(len(one.seconds) for one in rounds), "captured": sum(counts[name])}
        | {part: round(value, 4) for part, value in figures_of(rounds).items()}
        | {"rounds": [one.told for one in rounds]}
        for name, rounds in done.items()
    }
    for name in runs:
        found[name]["to_off"] = ratios(done[name], done["off"])
    return found


def plain_with(plain: PreparedRun, place: Path, recipe: Path, overrides: list[str]) -> PreparedRun:
    """A run with the samples of another."""
    folder = RunFolder(place)
    write_atomically(folder.config, load_recipe(recipe, overrides))
    write_atomically(folder.target, plain.target)
    write_atomically(folder.samples, plain.samples)
    return PreparedRun.open(place)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=["tiny"], choices=list(RECIPES))
    parser.add_argument("--draft", action="store_true")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--round-s", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=6.0, help="requests a second")
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--json", type=Path, default=RESULT)
    parser.add_argument("--learn", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.learn:
        learn(options.learn)
        return
    found = json.loads(options.json.read_text()) if options.json.is_file() else {}
    for target in options.targets:
        under = {
            "commit": git_sha(), "date": time.strftime("%Y-%m-%d"), "hardware": hardware(), "cpu": cpu_model(),
            "rate": options.rate, "share": options.share, "prompt_tokens": PROMPT, "new_tokens": ANSWERS,
            "round_s": options.round_s,
        }  # fmt: skip
        found[f"{target}{', draft' if options.draft else ''}"] = under | measure(target, options)
        write_atomically(options.json, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    run_main(main)
