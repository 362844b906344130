"""A registry, stand-ins for SGLang servers, and clients that send requests all the time."""

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import torch
from safetensors.torch import save_file

from infra.files.atomic import sha256_file, write_atomically
from infra.network.ports import reserved_port
from infra.records.acceptance import Conditions, RequestCounts
from infra.serving.config import CanaryConfig, FollowConfig, ServerConfig
from infra.serving.control import MARK
from infra.serving.follower import BY, Follower
from infra.serving.servers import REQUEST_S, ServerClient, version_of
from infra.tracking import registry, runs
from infra.tracking.promotion import DraftInService
from infra.tracking.runs import TrackedRun
from tests.infra.serving.stand_in_sglang import LOOKAHEAD, NEW_TOKENS, count_steps

DRAFT = "draft-served"
PROMPTS = tuple((number, number + 1, number + 2) for number in range(8))
PROGRAM = Path(__file__).parent / "stand_in_sglang.py"
STAND_IN = f"{sys.executable} {PROGRAM} --tests {os.getpid()}"
SETTLED_S = 600.0
MORTAL = """
import os, sys
from infra.processes.exit import die_with_parent
die_with_parent(int(sys.argv[1]))
os.execv(sys.argv[2], sys.argv[2:])
"""
ARGUMENTS = ("--speculative-algorithm", "EAGLE3")
CONDITIONS = Conditions(
    target="t", target_revision="r", draft="d", draft_revision="d", dataset_hash="d", template_hash="t", thinking=False,
    temperature=0.0, sampled_temperature=1.0, prompts=len(PROMPTS), prompt_tokens=3, max_new_tokens=NEW_TOKENS,
    lookahead=LOOKAHEAD, topk=1, concurrency=1, engine="transformers", versions={}, dtype="float32", hardware="",
    threads=1,
)  # fmt: skip


def benchmarked(length: float) -> RequestCounts:
    """The counts of a draft of this acceptance length."""
    rows = tuple((NEW_TOKENS - 1, count_steps(list(prompt), length)) for prompt in PROMPTS)
    return RequestCounts(conditions=CONDITIONS, greedy={LOOKAHEAD: rows}, sampled={}, prompts=PROMPTS)


def stand_in_draft(export: Path, number: int, worth: dict[str, Any]) -> Path:
    """What a stand-in loads, with arguments for SGLang."""
    (export / "serving").mkdir(parents=True)
    if worth.get("in_weights"):
        save_file({"length": torch.tensor([worth.pop("length")])}, export / "model.safetensors")
        worth["architectures"] = ["LlamaForCausalLMEagle3"]
    else:
        (export / "model.safetensors").write_text(f"weights {number}")
    (export / "config.json").write_text(json.dumps(worth))
    (export / "serving" / "sglang.json").write_text(json.dumps({"arguments": ARGUMENTS}))
    return export


@dataclass
class ServingWorld:
    """Everything around a follower."""

    folder: Path
    uri: str
    ports: Sequence[int]
    said: list[str] = field(default_factory=list)
    swaps: bool = False
    """Reading two versions' weights takes a second, each time that a server changes."""

    def config(self, **changes: Any) -> FollowConfig:
        """Settings with short waits."""
        servers = tuple(
            ServerConfig(url=f"http://127.0.0.1:{port}", command=f"{STAND_IN} --port {port}") for port in self.ports
        )
        given = {
            "draft": DRAFT, "tracking_uri": self.uri, "folder": str(self.folder / "served"), "servers": servers,
            "canary": CanaryConfig(steps=300, wait_s=1.5), "poll_s": 0.1, "swap": self.swaps, "drain_s": 10.0,
            "start_timeout_s": 30.0, "unhealthy_s": 5.0,
        }  # fmt: skip
        return FollowConfig.model_validate(given | changes)

    def follower(self, **changes: Any) -> Follower:
        def withdraw(version: int, reason: str) -> None:
            DraftInService(self.uri, DRAFT).withdraw(version, by=BY, reason=reason)

        return Follower(self.config(**changes), self.uri, withdraw, self.said.append)

    def register(
        self,
        length: float = 2.5,
        promised: float | None = None,
        *,
        counts: bool = True,
        export: Path | None = None,
        **worth: Any,
    ) -> int:
        """A version of the stand-in, or an `export` without a benchmark; `promised`: what its benchmark said."""
        number = len(registry.list_drafts(self.uri, DRAFT))
        place = self.folder / f"run-{number}"
        place.mkdir()
        run = runs.start_run(place / "tracking.json", self.uri, "test", f"run-{number}", {}, {})
        counts = counts and export is None
        export = export or stand_in_draft(place / "export", number, {"length": length} | worth)
        if counts:
            write_atomically(place / "request_counts.json", benchmarked(promised or length))
            self._log(run, place / "request_counts.json")
        model_id = runs.log_folder(run, export, "draft", 1, "draft")
        tags = {registry.RUN: f"run-{number}", registry.WEIGHTS_SHA256: sha256_file(export / "model.safetensors")}
        return registry.register(self.uri, DRAFT, model_id, run.run_id, tags).version

    @staticmethod
    def _log(run: TrackedRun, file: Path) -> None:
        from infra.tracking.client import connect

        connect(run.uri).log_artifact(run.run_id, str(file), registry.BENCHMARK)

    def promote(self, version: int) -> None:
        DraftInService(self.uri, DRAFT).promote(version, by="ada", reason=f"version {version} is better")

    def champion(self) -> int | None:
        champion = registry.champion(self.uri, DRAFT)
        return champion and champion.version

    def running(self) -> list[int | None]:
        """What the servers report."""
        found: list[int | None] = []
        for port in self.ports:
            try:
                report = ServerClient(f"http://127.0.0.1:{port}").report()
                found.append(version_of(report.draft, self.folder / "served", DRAFT))
            except httpx.HTTPError:
                found.append(None)
        return found

    def settle(self, follower: Follower, rounds: int = 10_000, timeout_s: float = SETTLED_S) -> None:
        """Rounds until all is as the registry wants it."""
        deadline = time.monotonic() + timeout_s
        for _ in range(rounds):
            if follower.round():
                return
            assert time.monotonic() < deadline, f"it does not settle: {self.said[-20:]}"
            time.sleep(0.05)

    def servers(self) -> list[psutil.Process]:
        """The processes of the servers."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK, "").startswith(str(self.folder)):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def end(self) -> None:
        for process in self.servers():
            process.kill()


@contextmanager
def serving_world(folder: Path, uri: str, servers: int) -> Iterator[ServingWorld]:
    """A world whose servers end with it."""
    from contextlib import ExitStack

    with ExitStack() as stack:
        ports = [stack.enter_context(reserved_port())[0] for _ in range(servers)]
        world = ServingWorld(folder, uri, ports)
        stack.callback(world.end)
        yield world


def with_options(world: ServingWorld, options: str) -> tuple[ServerConfig, ...]:
    """The servers, started with further arguments."""
    servers = world.config().servers
    return tuple(one.model_copy(update={"command": f"{one.command} {options}"}) for one in servers)


class Clients:
    """Sends requests all the time, each to a server chosen at random; one that fails is sent once more, to another.

    Counts the healthy servers, too, as a load balancer would.
    """

    def __init__(self, ports: Sequence[int], seed: int = 0) -> None:
        self._ports, self._draws, self._ending = list(ports), random.Random(seed), threading.Event()
        self._thread = ThreadPoolExecutor(1)
        self.sent = self.retried = 0
        self.lost: list[str] = []
        self.least_healthy = len(ports)

    def _run(self) -> None:
        limits = httpx.Limits(max_keepalive_connections=0)
        with httpx.Client(timeout=REQUEST_S, limits=limits, trust_env=False) as http:
            while not self._ending.wait(0.01):
                healthy = [port for port in self._ports if self._is_healthy(http, port)]
                self.least_healthy = min(self.least_healthy, len(healthy))
                self._send(http, self._draws.sample(healthy, min(2, len(healthy))))

    def _send(self, http: httpx.Client, ports: Sequence[int]) -> None:
        self.sent += 1
        errors = []
        for port in ports:
            try:
                sampling = {"temperature": 0.0, "max_new_tokens": 16}
                body = {"input_ids": [self._draws.randrange(1000)], "sampling_params": sampling}
                http.post(f"http://127.0.0.1:{port}/generate", json=body).raise_for_status()
            except httpx.HTTPError as error:
                errors.append(f"{port}: {error!r}")
                self.retried += len(errors) == 1
            else:
                return
        self.lost.append("; ".join(errors) or "no healthy server")

    @staticmethod
    def _is_healthy(http: httpx.Client, port: int) -> bool:
        try:
            return http.get(f"http://127.0.0.1:{port}/health").is_success
        except httpx.HTTPError:
            return False

    def __enter__(self) -> "Clients":
        self._running = self._thread.submit(self._run)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._ending.set()
        self._thread.shutdown()
        self._running.result()
        assert self.sent or kind, "nobody sent a request"


def start_follower(world: ServingWorld, settings: Path, log: Path) -> subprocess.Popen[bytes]:
    """`draftsmith serve-follow` as a process of its own, which does not outlive the tests' process."""
    if not settings.is_file():
        settings.write_text(world.config().model_dump_json())  # JSON is YAML
    program = str(Path(sys.executable).with_name("draftsmith"))
    command = [sys.executable, "-c", MORTAL, str(os.getpid()), program, "serve-follow", str(settings)]
    with log.open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=world.folder)
