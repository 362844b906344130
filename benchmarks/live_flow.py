"""The loop of docs/live.md with nobody watching: Prefect, MLflow, a follower, and real SGLang servers with users.

    SGLANG_PLATFORM=draftsmith_test_cpu python benchmarks/live_flow.py [--samples 200] [--servers 2] [--seed 0]

A whole stack (`draftsmith up`), and the tiny target on real servers (the tests' kernels) that `draftsmith serve-follow`
starts and keeps at the champion. `draftsmith retrain` trains the first champion on answers to docstrings, and
`draftsmith deploy` brings the live recipe to Prefect. Then users change over to the language reference, and the
deployment is started once, as its schedule would. From there on nobody does anything: runs learn from the servers, the
gate decides, promotion starts the next run and has the follower bring the draft to the servers, and from a draft that
is ahead by too little to be sure the next run goes on, until one gains nothing. Users ask all the while, and ask
another server where one does not answer.

Recorded are served acceptance over all requests, in windows, every decision of the registry with the requests served
by then, lost requests, and which servers were started again. At the end the servers and a draft trained offline on the
new subject, with as many samples as a round has learned in all, are asked the same questions.
"""

import argparse
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml
from follower import marked
from live_loop import ANSWER, LONGEST, LOOKAHEAD, REGENERATED, Service, Traffic, forever, learned, offline, subjects
from machine import cpu_model
from prefect_requests import ask
from soak import draftsmith, environment_of
from transformers import PreTrainedTokenizerBase

from infra.drift.scrape import ask_info, read_server_info
from infra.files.atomic import write_atomically
from infra.network.ports import HOST, reserved_port
from infra.processes.exit import run_main
from infra.provenance import git_sha, hardware, versions
from infra.serving.servers import version_of
from infra.sglang.command import ServerSpec, server_environment, serving_command
from infra.sglang.config import SGLangConfig
from infra.tracking import registry
from models.config.recipe import load_recipe
from models.data.tokenizer import read_tokenizer
from models.targets.prepare import prepare_target

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "live_flow.json"
START = "furthest"
DRAFT, WINDOW, ASKED, USERS, PAUSE_S = "draft-live", 50, 150, 2, 0.4
SETTLED_S, LOOP_S, QUIET_S = 600.0, 7200.0, 60.0
OVER = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


class Users(threading.Thread):
    """They ask the servers, one after the other, and another server where one does not answer."""

    def __init__(self, ports: Sequence[int], target: Path, texts: Iterator[str]) -> None:
        super().__init__(daemon=True)
        self._ports, self._ending = list(ports), threading.Event()
        self._tokenizer: PreTrainedTokenizerBase = read_tokenizer(str(target))
        self._lock = threading.Lock()
        self.texts, self.traffic, self.retried = texts, Traffic(), 0
        self.lost: list[str] = []

    def run(self) -> None:
        threads = [threading.Thread(target=self._use, args=(number,)) for number in range(USERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def stop(self) -> None:
        self._ending.set()
        self.join(300)

    def _use(self, number: int) -> None:
        draws = random.Random(number)
        while not self._ending.wait(draws.expovariate(1 / PAUSE_S)):
            with self._lock:
                text = next(self.texts)
            self.ask(text, self.traffic, draws.sample(self._ports, len(self._ports)))

    def ask(self, text: str, into: Traffic, ports: Sequence[int]) -> None:
        """One request, of the first of these servers that answers."""
        ids: Any = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        sampling = {"max_new_tokens": ANSWER, "temperature": 0.0, "ignore_eos": True}
        body, errors = {"input_ids": ids, "sampling_params": sampling}, list[str]()
        for port in ports:
            try:
                with httpx.Client(timeout=60.0, trust_env=False) as client:
                    answer = client.post(f"http://{HOST}:{port}/generate", json=body).raise_for_status()
            except httpx.HTTPError as error:
                errors.append(f"{port}: {error!r}")
                continue
            meta = answer.json()["meta_info"]
            with self._lock:
                self.retried += bool(errors)
                into.tokens.append(meta["completion_tokens"] - 1)
                into.steps.append(meta["spec_verify_ct"])
            return
        with self._lock:
            self.lost.append("; ".join(errors))

    def measured(self, texts: Sequence[str]) -> float:
        """Acceptance of the same questions, asked of all servers in turn."""
        traffic = Traffic()
        for number, text in enumerate(texts[:ASKED]):
            turn = number % len(self._ports)
            self.ask(text, traffic, [*self._ports[turn:], *self._ports[:turn]])
        return traffic.acceptance()


class Fleet:
    """The servers, and the follower that starts them."""

    def __init__(self, folder: Path, target: Path, ports: Sequence[int]) -> None:
        self.folder, self.ports = folder, ports
        self.sockets = [folder / f"live-{port}.sock" for port in ports]
        spec, config = ServerSpec(target, "float32", LONGEST + 8, 8), SGLangConfig()
        threads = server_environment(config, 1)
        servers = list[dict[str, str]]()
        for port, socket in zip(ports, self.sockets, strict=True):
            variables = [f"{name}={value}" for name, value in (threads | {"DRAFTSMITH_LIVE": str(socket)}).items()]
            command = ["env", *variables, *serving_command(spec, config, (), port), "--sleep-on-idle"]
            servers.append({"url": f"http://{HOST}:{port}", "command": shlex.join(command)})
        self.settings = folder / "follow.yaml"
        arguments = load_recipe(ROOT / "recipes/tiny.yaml").draft.engine_arguments(LOOKAHEAD)
        settings = {
            "draft": DRAFT, "folder": str(folder / "served"), "servers": servers, "arguments": [*arguments],
            "poll_s": 3.0, "canary": {"steps": 400, "wait_s": 60.0},
        }  # fmt: skip
        self.settings.write_text(yaml.safe_dump(settings))

    @contextmanager
    def followed(self) -> Iterator[None]:
        """`draftsmith serve-follow`, and at the end none of its servers."""
        command = [sys.executable, "-c", "from flows.command_line import main; main()", "serve-follow"]
        with (self.folder / "follower.log").open("ab") as log:
            follower = subprocess.Popen([*command, str(self.settings)], stdout=log, stderr=log, cwd=self.folder)
            try:
                yield
            finally:
                follower.terminate()
                follower.wait(120)
                subprocess.run([*command, str(self.settings), "--stop-servers"], stdout=log, stderr=log, check=True)

    def running(self) -> list[int | None]:
        """The version of each server; None: it does not answer, or runs none."""
        found = list[int | None]()
        for port in self.ports:
            try:
                with httpx.Client(timeout=10.0, trust_env=False) as client:
                    info = ask_info(client, f"http://{HOST}:{port}")
                found.append(version_of(read_server_info(info), self.folder / "served", DRAFT))
            except (httpx.HTTPError, json.JSONDecodeError):
                found.append(None)
        return found

    def settle(self) -> int:
        """Wait until all servers run the champion; its version."""
        deadline = time.monotonic() + SETTLED_S
        while time.monotonic() < deadline:
            champion = registry.champion(os.environ["MLFLOW_TRACKING_URI"], DRAFT)
            if champion and set(self.running()) == {champion.version}:
                return champion.version
            time.sleep(2.0)
        raise TimeoutError((self.folder / "follower.log").read_text()[-3000:])

    def processes(self) -> set[int]:
        """Ids of the servers' processes: others are there after a restart."""
        return {process.pid for process in marked(str(self.folder / "served"))}


def recipes(folder: Path, options: argparse.Namespace, fleet: Fleet, texts: Sequence[str]) -> tuple[Path, Path]:
    """The first champion's recipe, and that of the loop."""
    source = folder / "docstrings.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tiny = yaml.safe_load((ROOT / "recipes/tiny.yaml").read_text())
    tiny |= {"seed": options.seed, "tracking": {"registered_model": DRAFT}}
    tiny["promotion"]["traffic"]["sampling"] = "greedy"  # as these users ask
    tiny["benchmark"] |= {"prompt_tokens": LONGEST - ANSWER, "max_new_tokens": ANSWER, "prompts": 64}
    answered = {"temperature": 0.0, "max_new_tokens": ANSWER, "prompt_tokens": LONGEST - ANSWER}
    limits = {"chat_template": "none", "max_tokens": LONGEST, "overlong": "truncate"}
    first = tiny | {"name": "first", "data": limits | {
        "source": str(source), "regeneration": answered, "max_samples": options.champion_samples,
    }}  # fmt: skip
    servers = [
        {"address": f"http://{HOST}:{port}", "socket": str(socket)}
        for port, socket in zip(fleet.ports, fleet.sockets, strict=True)
    ]
    live = {
        "servers": servers, "consent": "a benchmark's own text", "retention_days": 1, "share": options.share,
        "patience_s": 0.2,
    }  # fmt: skip
    loop = tiny | {
        "name": "live",
        # With fewer held-out conversations the gate could not tell a round's gain from chance.
        "data": limits | {"source": "live", "max_samples": options.samples, "heldout_share": 0.3},
        "benchmark": tiny["benchmark"] | {"prompts": 512},
        "generator": tiny["generator"] | {"engine": "serving", "live": live, "count": len(servers)},
        "training": tiny["training"] | {"start_from": START, "learning_rate": options.learning_rate},
    }
    paths = folder / "first.yaml", folder / "live.yaml"
    for path, tree in zip(paths, (first, loop), strict=True):
        path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return paths


def runs() -> list[dict[str, Any]]:
    """Flow runs of the loop's deployment, the oldest first; not those that the schedule plans for next year."""
    deployed = ask("deployments/name/retrain/live")
    found = ask("flow_runs/filter", {"deployments": {"id": {"any_": [deployed["id"]]}}})
    return sorted((run for run in found if not run["auto_scheduled"]), key=lambda run: run["created"])


def await_end(users: Users) -> list[dict[str, Any]]:
    """Wait until no run is left and none comes; what each came to."""
    deadline, quiet_since, seen = time.monotonic() + LOOP_S, time.monotonic(), dict[str, dict[str, Any]]()
    while time.monotonic() < deadline:
        now = runs()
        for run in now:
            kind = run["state"]["type"]
            if kind in OVER and run["id"] not in seen:
                by = (run["created_by"] or {}).get("type")
                seen[run["id"]] = {"run": run["name"], "state": kind, "said": run["state"]["message"],
                                   "started_by": by or "hand", "requests": len(users.traffic.steps),
                                   "seconds": round(run["total_run_time"])}  # fmt: skip
                print(seen[run["id"]], flush=True)
        if len(seen) < len(now):
            quiet_since = time.monotonic()
        if time.monotonic() > quiet_since + QUIET_S:
            return list(seen.values())
        time.sleep(2.0)
    raise TimeoutError(f"the loop goes on after {LOOP_S:g} s: {seen}")


def loop(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    target, texts = prepare_target(load_recipe(ROOT / "recipes/tiny.yaml").target), subjects()
    with ExitStack() as stack:
        ports = [stack.enter_context(reserved_port())[0] for _ in range(options.servers)]
        fleet = Fleet(folder, Path(target.path), ports)
        first, live = recipes(folder, options, fleet, texts["docstrings"][: round(1.2 * options.champion_samples)])
        shutil.copy(ROOT / "prefect.yaml", folder)
        draftsmith(folder, "up", "--background")
        stack.callback(draftsmith, folder, "down")
        os.environ |= environment_of(folder)
        draftsmith(folder, "retrain", str(first))
        stack.enter_context(fleet.followed())
        found: dict[str, Any] = {"first": fleet.settle()}
        users = Users(ports, Path(target.path), forever(texts["docstrings"]))
        asked = texts["reference, asked"]
        found |= {"before": users.measured(texts["docstrings, asked"]), "after_change": users.measured(asked)}
        print(found, flush=True)
        started = fleet.processes()
        draftsmith(folder, "deploy", str(live), "--cron", "0 3 1 1 *")
        users.start()
        stack.callback(users.stop)
        while len(users.traffic.steps) < options.quiet_requests:
            time.sleep(1.0)
        users.texts, found["changed_at"] = forever(texts["reference"]), len(users.traffic.steps)
        deployed = ask("deployments/name/retrain/live")
        ask(f"deployments/{deployed['id']}/create_flow_run", {})
        found["runs"] = await_end(users)
        found["champion"] = fleet.settle()
        users.stop()
        found["acceptance"] = users.measured(asked)
        decisions = registry.history(os.environ["MLFLOW_TRACKING_URI"], DRAFT)
        found["decisions"] = [[one.version, one.outcome, one.by] for one in decisions]
        found["server_processes_gone"] = len(started - fleet.processes())
        steps, tokens = users.traffic.steps, users.traffic.tokens
        found |= {"requests": len(steps), "retried": users.retried, "lost": users.lost}
        found["curve"] = [
            [begin, round(sum(tokens[begin : begin + WINDOW]) / sum(steps[begin : begin + WINDOW]), 4)]
            for begin in range(0, len(steps) - WINDOW + 1, WINDOW)
        ]
    service, learnt = Service(target, folder), options.samples * len(found["runs"])
    other = offline(folder / "offline", target, texts["reference"], learnt, options.seed)
    found["offline"] = learned(other, *REGENERATED) | {"samples": learnt}
    try:
        service.serve(other.export)
        found["offline"]["acceptance"] = service.measured(asked)
    finally:
        service.stop()
    found["of_offline"] = round(found["acceptance"] / found["offline"]["acceptance"], 4)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=400, help="that a round learns")
    parser.add_argument("--champion-samples", type=int, default=800)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--share", type=float, default=1.0)
    parser.add_argument("--quiet-requests", type=int, default=200, help="before users change over")
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="live-flow-"))
    folder.chmod(0o755)  # PostgreSQL runs as another user where this one is root
    memory = folder / "shm"
    memory.mkdir()
    os.environ |= {"DRAFTSMITH_RUNS": str(folder / "runs"), "DRAFTSMITH_SHM": str(memory), "PWD": str(folder)}
    os.environ |= {"PREFECT_HOME": str(folder / "prefect")}
    result = {
        "commit": git_sha(), "date": time.strftime("%Y-%m-%d"), "hardware": hardware(), "cpu": cpu_model(),
        "versions": versions(), "samples": options.samples, "servers": options.servers, "share": options.share,
        "lookahead": LOOKAHEAD, "learning_rate": options.learning_rate, "start_from": START,
    }  # fmt: skip
    result |= loop(folder, options)
    seeds = json.loads(options.json.read_text()) if options.json.is_file() else {}
    seeds[f"seed {options.seed}"] = result
    write_atomically(options.json, json.dumps(seeds, indent=1) + "\n")
    print(json.dumps(result, indent=1), flush=True)
    shutil.rmtree(folder)


if __name__ == "__main__":
    run_main(main)
