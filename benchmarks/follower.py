"""Rollouts over real SGLang servers, with kills in between: does every one end as the registry says?

    SGLANG_PLATFORM=draftsmith_test_cpu python benchmarks/follower.py --run RUN [--seeds 0:50] [--servers 3]

RUN is a finished run of recipes/tiny.yaml. An MLflow server holds versions of its draft: two that are as good as it
was benchmarked, one whose weights are cut off, one with a wrong flag in its configuration, and one with so much noise
in its weights that it accepts about 30 % less. A seed promotes one of them, in turn, and kills the follower, a server
or the registry, one to three times, at random moments. All the while a client sends prompts to servers that were
healthy a moment ago, and once more, to another one, where that fails.

A seed is whole if all servers end with one version, the registry's champion; a good version is champion then, and a bad
one was withdrawn; no request was lost; and at most one server was ever missing beside those that were killed. A line is
added to the result's `.jsonl` file for each attempt; started again, it runs those that are missing or were not whole,
and the result lists the attempts that were not whole before.
"""

import argparse
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from attempts import Attempts
from safetensors.torch import load_file, save_file

from infra.drift.scrape import ask_info, read_server_info
from infra.files.atomic import sha256_file, write_atomically
from infra.network.health import trouble
from infra.network.ports import HOST, reserved_port
from infra.processes.exit import run_main
from infra.provenance import versions
from infra.records.acceptance import RequestCounts
from infra.serving.config import CanaryConfig, FollowConfig, ServerConfig
from infra.serving.control import MARK
from infra.serving.servers import version_of
from infra.sglang.command import ServerSpec, serving_command
from infra.tracking import registry, runs
from infra.tracking.client import connect
from infra.tracking.promotion import DraftInService
from models.benchmark.contestants import load_contestants
from models.benchmark.measure import at, walk_decoded
from models.benchmark.served import setup_of, speculative_arguments
from models.benchmark.smoke import ratio
from models.run import PreparedRun

RESULT = Path(__file__).parent / "results" / "follower.json"
DRAFT = "draft-followed"
KINDS = ("good", "cut off", "good", "wrongly described", "good", "30 % worse")
WRONG_FLAG, IDLE = "fc_norm", "--sleep-on-idle"
WEAK = 0.7
SETTLED_S, UP_S = 1200.0, 120.0
CANARY = CanaryConfig(steps=400, wait_s=60.0)


def variants(run: PreparedRun, counts: RequestCounts, folder: Path) -> dict[str, Path]:
    """Exports of every kind; the second good one differs from the first in one number's last digits."""
    export = run.folder.export
    places = {
        kind: shutil.copytree(export, folder / kind.replace(" ", "-").replace("%", "percent"))
        for kind in ("good", "cut off", "wrongly described")
    }
    tensors = load_file(export / "model.safetensors")
    name = next(name for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.ndim == 2)
    nudged = {key: tensor.clone() for key, tensor in tensors.items()}
    nudged[name][0, 0] *= 1.01
    places["also good"] = shutil.copytree(export, folder / "also-good")
    save_file(nudged, places["also good"] / "model.safetensors")
    weights = places["cut off"] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    config = places["wrongly described"] / "config.json"
    described = json.loads(config.read_text())
    assert WRONG_FLAG in described, f"the export has no {WRONG_FLAG}: {sorted(described)}"
    config.write_text(json.dumps(described | {WRONG_FLAG: not described[WRONG_FLAG]}))
    places["30 % worse"] = weakened(run, counts, tensors, folder / "30-percent-worse")
    return places


def weakened(run: PreparedRun, counts: RequestCounts, tensors: dict[str, torch.Tensor], place: Path) -> Path:
    """The draft with noise in its matrices, as much as leaves about 70 % of its acceptance length."""
    lookahead, whole = run.config.benchmark.lookahead, None
    shutil.copytree(run.folder.export, place)
    low, high = 0.0, 2.0
    for _ in range(7):
        scale, noise = (low + high) / 2, torch.Generator().manual_seed(1)
        noisy = {
            name: tensor + scale * tensor.float().std().to(tensor.dtype) * torch.randn(tensor.shape, generator=noise)
            if tensor.is_floating_point() and tensor.ndim == 2
            else tensor
            for name, tensor in tensors.items()
        }
        save_file({name: tensor.to(tensors[name].dtype) for name, tensor in noisy.items()}, place / "model.safetensors")
        contestants = load_contestants(Path(run.target.path), [place], torch.float32)
        walked = walk_decoded(contestants, contestants.draft, counts.prompts, counts.texts, lookahead)
        rows = [one.as_served(len(text) - 1) for one, text in zip(at(walked, lookahead), counts.texts, strict=True)]
        whole = whole or ratio(counts.greedy[lookahead][: len(counts.prompts)])
        share = ratio(rows) / whole
        print(f"noise of {scale:.3f} standard deviations: {share:.3f} of the acceptance length", flush=True)
        low, high = (scale, high) if share > WEAK else (low, scale)
    return place


class Registry:
    """An MLflow server that can be killed, with the versions."""

    def __init__(self, folder: Path, port: int) -> None:
        self.uri, self._folder, self._port = f"http://{HOST}:{port}", folder, port
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, again after a kill."""
        place = self._folder / "mlflow"
        place.mkdir(exist_ok=True)
        command = [
            sys.executable,
            "-m",
            "mlflow",
            "server",
            "--host",
            HOST,
            "--port",
            str(self._port),
            "--workers",
            "1",
        ]
        command += ["--backend-store-uri", f"sqlite:///{place}/mlflow.db", "--artifacts-destination", str(place)]
        with (place / "log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + UP_S
        while trouble(f"{self.uri}/health", 5.0, direct=True) is not None:
            assert time.monotonic() < deadline, f"MLflow does not start, see {place}/log"
            time.sleep(0.3)

    def kill(self) -> None:
        """`kill -9` of all its processes."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def register(self, export: Path, counts: RequestCounts, number: int) -> int:
        """One more version."""
        record = self._folder / f"tracking-{number}.json"
        run = runs.start_run(record, self.uri, "rollouts", f"run-{number}", {}, {})
        write_atomically(self._folder / "request_counts.json", counts)
        connect(self.uri).log_artifact(run.run_id, str(self._folder / "request_counts.json"), registry.BENCHMARK)
        model = runs.log_folder(run, export, "draft", 1, "draft")
        tags = {registry.RUN: f"run-{number}", registry.WEIGHTS_SHA256: sha256_file(export / "model.safetensors")}
        return registry.register(self.uri, DRAFT, model, run.run_id, tags).version


class Watch(threading.Thread):
    """Asks every server for its health all the time, and sends requests to those that answered."""

    def __init__(self, ports: Sequence[int], prompts: Sequence[Sequence[int]], seed: int) -> None:
        super().__init__(daemon=True)
        self._ports, self._prompts, self._draws = list(ports), prompts, random.Random(seed)
        self._ending = threading.Event()
        self.healthy: dict[int, bool] = dict.fromkeys(ports, False)
        self.killed: set[int] = set()
        """Ports of servers that were killed and are not back."""
        self.sent = self.retried = self.missing = 0
        self.lost: list[str] = []
        self._threads = [threading.Thread(target=self._ask, args=(port,), daemon=True) for port in ports]

    def _ask(self, port: int) -> None:
        while not self._ending.wait(0.3):
            self.healthy[port] = trouble(f"http://{HOST}:{port}/health", 30.0, direct=True) is None
            if self.healthy[port]:
                self.killed.discard(port)

    def run(self) -> None:
        with httpx.Client(timeout=60.0, trust_env=False, limits=httpx.Limits(max_keepalive_connections=0)) as http:
            while not self._ending.wait(0.1):
                up = [port for port in self._ports if self.healthy[port]]
                gone = len(self._ports) - len(up) - len(self.killed - set(up))
                self.missing = max(self.missing, gone)
                self._send(http, self._draws.sample(up, min(2, len(up))))

    def _send(self, http: httpx.Client, ports: Sequence[int]) -> None:
        self.sent += 1
        errors: list[str] = []
        body = {"input_ids": list(self._draws.choice(self._prompts))}
        body |= {"sampling_params": {"temperature": 0.0, "max_new_tokens": 24}}
        for port in ports:
            try:
                http.post(f"http://{HOST}:{port}/generate", json=body).raise_for_status()
            except httpx.HTTPError as error:
                errors.append(f"{port}: {error!r}")
                self.retried += len(errors) == 1
            else:
                return
        self.lost.append("; ".join(errors) or "no healthy server")

    def __enter__(self) -> "Watch":
        for thread in self._threads:
            thread.start()
        deadline = time.monotonic() + UP_S
        while not all(self.healthy.values()):
            assert time.monotonic() < deadline, f"servers are not healthy: {self.healthy}"
            time.sleep(0.1)
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self.join()


class Campaign:
    """Seeds one after the other, over the same servers and the same registry."""

    def __init__(self, run: PreparedRun, folder: Path, registered: Registry, ports: Sequence[int]) -> None:
        self.run, self.folder, self.registry, self.ports = run, folder, registered, ports
        self.counts = RequestCounts.read(run.folder.request_counts)
        self.settings = folder / "follow.yaml"
        self.settings.write_text(self._config().model_dump_json())  # JSON is YAML
        self.exports = variants(run, self.counts, folder)
        self.follower: subprocess.Popen[bytes] | None = None
        self.numbers = 0

    def _config(self) -> FollowConfig:
        setup, lookahead = setup_of(self.run), self.run.config.benchmark.lookahead
        longest = setup.prompt_tokens + setup.max_new_tokens + lookahead + 1
        spec = ServerSpec(setup.target, setup.dtype, longest, 4)
        sglang = setup.generator.sglang
        arguments = speculative_arguments(self.run.folder.export, lookahead)[2:]
        # Three idle servers would spin on two cores.
        commands = {port: shlex.join([*serving_command(spec, sglang, (), port), IDLE]) for port in self.ports}
        servers = [ServerConfig(url=f"http://{HOST}:{port}", command=command) for port, command in commands.items()]
        return FollowConfig(
            draft=DRAFT, tracking_uri=self.registry.uri, folder=str(self.folder / "served"), servers=tuple(servers),
            canary=CANARY, arguments=tuple(arguments), poll_s=1.0, drain_s=30.0, start_timeout_s=300.0,
        )  # fmt: skip

    def register(self, kind: str) -> int:
        """A version of a kind."""
        self.numbers += 1
        place = self.exports["also good" if kind == "good" and self.numbers % 2 else kind]
        return self.registry.register(place, self.counts, self.numbers)

    def promote(self, version: int) -> None:
        """By hand."""
        DraftInService(self.registry.uri, DRAFT).promote(version, by="campaign", reason=f"version {version}")

    def start_follower(self) -> None:
        """`draftsmith serve-follow`, again after a kill."""
        command = [str(Path(sys.executable).with_name("draftsmith")), "serve-follow", str(self.settings)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with (self.folder / "follower.log").open("ab") as log:
            self.follower = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def kill_follower(self) -> None:
        """`kill -9`."""
        if self.follower is not None:
            self.follower.kill()
            self.follower.wait()

    def state(self) -> tuple[int | None, list[int | None]]:
        """The champion, and what the servers say that they run."""
        champion = registry.champion(self.registry.uri, DRAFT)
        return champion and champion.version, [self._running(port) for port in self.ports]

    def _running(self, port: int) -> int | None:
        try:
            with httpx.Client(timeout=10.0, trust_env=False) as client:
                info = ask_info(client, f"http://{HOST}:{port}")
        except (httpx.HTTPError, json.JSONDecodeError):
            return None
        return version_of(read_server_info(info), self.folder / "served", DRAFT)

    def settle(self, watch: Watch | None = None) -> bool:
        """Wait until all servers run the champion, and are healthy; False if that does not come."""
        deadline, before = time.monotonic() + SETTLED_S, None
        while time.monotonic() < deadline:
            if self.follower is None or self.follower.poll() is not None:
                self.start_follower()
            now = self.state()
            healthy = watch is None or all(watch.healthy.values())
            if now == before and healthy and set(now[1]) == {now[0]}:
                return True
            before = now
            time.sleep(3.0)
        return False

    def seed(self, seed: int) -> dict[str, Any]:
        """One rollout."""
        draws, kind, began = random.Random(seed), KINDS[seed % len(KINDS)], time.monotonic()
        before, version = self.state()[0], self.register(kind)
        log = self.folder / "follower.log"
        read = log.stat().st_size
        killed: list[str] = []
        with Watch(self.ports, self.counts.prompts, seed) as watch:
            self.promote(version)
            for _ in range(draws.randint(1, 3)):
                time.sleep(draws.uniform(0.0, 45.0))
                killed.append(self.kill_something(draws, watch))
            settled = self.settle(watch)
        champion, running = self.state()
        wanted = version if kind == "good" else before
        said = log.read_bytes()[read:].decode().splitlines()
        found = {
            "seed": seed, "kind": kind, "killed": killed, "settled": settled, "champion": champion, "wanted": wanted,
            "running": running, "sent": watch.sent, "retried": watch.retried, "lost": watch.lost,
            "missing": watch.missing, "seconds": round(time.monotonic() - began, 1),
            "said": [line for line in said if "goes back" in line or "holds" in line],
        }  # fmt: skip
        whole = settled and champion == wanted and set(running) == {wanted} and not watch.lost and watch.missing <= 1
        return found | {"whole": whole}

    def kill_something(self, draws: random.Random, watch: Watch) -> str:
        """The follower, the registry, or a server where all others are healthy."""
        what = draws.choice(("follower", "follower", "registry", "server"))
        if what == "registry":
            self.registry.kill()
            time.sleep(draws.uniform(0.0, 10.0))
            self.registry.start()
        elif what == "server" and all(watch.healthy.values()):
            port = draws.choice(list(self.ports))
            watch.killed.add(port)
            for process in marked(f"{self.folder / 'served'} http://{HOST}:{port}"):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
        else:
            what = "follower"
            self.kill_follower()
            self.start_follower()
        return what

    def end(self) -> None:
        """Nothing is left."""
        self.kill_follower()
        self.registry.kill()
        for process in marked(str(self.folder)):
            with suppress(psutil.NoSuchProcess):
                process.kill()


def marked(mark: str) -> Iterator[psutil.Process]:
    """Processes of servers whose mark begins so."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK, "").startswith(mark):
                yield process


@contextmanager
def campaign(run: PreparedRun, servers: int) -> Iterator[Campaign]:
    """A campaign with a good version in service."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="draftsmith-follower-")))
        *ports, port = [stack.enter_context(reserved_port())[0] for _ in range(servers + 1)]
        registered = Registry(folder, port)
        stack.callback(registered.kill)
        registered.start()
        found = Campaign(run, folder, registered, ports)
        stack.callback(found.end)
        found.promote(found.register("good"))
        found.start_follower()
        assert found.settle(), (folder / "follower.log").read_text()[-3000:]
        yield found


def run_seeds(found: Campaign, seeds: Sequence[int], keep: Callable[[dict[str, Any]], None]) -> None:
    """All of them, with an estimate of the rest."""
    began = time.monotonic()
    for number, seed in enumerate(seeds, start=1):
        row = found.seed(seed)
        keep(row)
        left = (time.monotonic() - began) / number * (len(seeds) - number)
        state = "whole" if row["whole"] else f"NOT WHOLE: {row}"
        print(f"seed {seed}, {row['kind']}, killed {', '.join(row['killed'])}: {state} in {row['seconds']} s; "
              f"{left / 60:.0f} min left", flush=True)  # fmt: skip


def summary(attempts: Attempts) -> dict[str, Any]:
    """Sums over the newest attempt of every seed, and the attempts that were made again."""
    rows, result = attempts.newest, attempts.under() | attempts.settings
    kinds = {kind: [row for row in rows if row["kind"] == kind] for kind in dict.fromkeys(KINDS)}
    result["whole"] = {kind: f"{sum(row['whole'] for row in of)} of {len(of)}" for kind, of in kinds.items()}
    result |= {name: sum(row[name] for row in rows) for name in ("sent", "retried")}
    result["lost"] = sum(len(row["lost"]) for row in rows)
    return result | {"failed_before_a_later_attempt": attempts.replaced}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--seeds", default="0:50")
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # servers are not left behind
    first, last = map(int, options.seeds.split(":"))
    settings = {"servers": options.servers, "versions": versions()}
    attempts = Attempts(options.json.with_suffix(".jsonl"), settings)
    whole = {row["seed"] for row in attempts.newest if row["whole"]}
    missing = [seed for seed in range(first, last) if seed not in whole]
    if missing:
        with campaign(PreparedRun.open(options.run), options.servers) as found:
            run_seeds(found, missing, attempts.keep)
    result = summary(attempts)
    write_atomically(options.json, json.dumps(result | {"rows": attempts.newest}, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    run_main(main)
