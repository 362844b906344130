"""A simulated fortnight of operation: does the system keep its draft sharp without anyone watching?

    python benchmarks/soak.py [--json benchmarks/results/soak.json] [--seed 0]

A whole stack (`draftsmith up`: PostgreSQL, S3, Prefect, MLflow, workers) with the deployments of prefect.yaml on the
tiny target. Days are short: in each the simulated engine serves some requests, and watch-traffic looks six times. What
is served is real: the champion's own counts over the target's continuations of that day's prompts (soak_serving.py).

The traffic drifts twice (people begin to shout, then to write digits for letters) and is disturbed once by a bad
morning. In between somebody registers a draft that was hardly trained, an export is broken after its benchmark, and a
draft that passes the gate serves badly. Right is: two retrainings by drift, both promoted; none by noise; the worse
draft refused; the broken export and the badly serving draft taken back; nothing left behind.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml
from prefect_requests import ask
from soak_serving import LOOKAHEAD, Engine, count, engine

from infra.drift.scrape import Counters
from infra.files.atomic import write_atomically
from infra.processes.exit import run_main
from infra.provenance import git_sha, hardware, versions
from infra.records.acceptance import RegisteredDraft
from models.config.recipe import load_recipe
from models.data import python_docs

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "soak.json"
DRAFT = "draft-tiny"
LOOKS_A_DAY = 6
WINDOW_STEPS = 2000
FLOW_S = 1800.0
EVENT_S = 90.0
KEEP_RUNS = 3
REQUESTS_A_DAY = 1200
DRIFT_STEPS = 75
"""Of a retraining by drift: few enough that a longer one still improves on it."""
RECIPE = [
    "data.max_tokens=96",
    "data.heldout_share=0.3",
    "training.max_steps=150",
    "training.samples_per_step=4",
    "training.log_steps=50",
    "benchmark.prompts=320",
    "benchmark.prompt_tokens=48",
    "benchmark.max_new_tokens=24",
    "benchmark.reference_tokens=48",
    "benchmark.timed_tokens=16",
    "promotion.smoke_prompts=4",
]
LEET = str.maketrans("aeiostAEIOST", "431057431057")
TRAFFIC: dict[str, Callable[[str], str]] = {
    "plain": lambda text: text,
    "shouted": lambda text: text.upper(),
    "leet": lambda text: text.translate(LEET),
}


@dataclass
class Day:
    """What one day came to."""

    day: int
    traffic: str
    what: str
    champion: int | None = None
    acceptance_length: float | None = None
    """As the engine counted it."""
    happened: list[str] = field(default_factory=list)


class Soak:
    """The stack, the simulated traffic, and what is asked of both."""

    def __init__(self, folder: Path, served: Engine, seed: int):
        self.folder, self.served, self.seed = folder, served, seed
        self.prompts = write_traffic(folder, seed)
        self.days: list[Day] = []
        self.followed: list[str] = []
        """Flow runs that events have started, and that have ended."""

    @property
    def logs(self) -> Path:
        return self.folder / "requests"

    def api(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return ask(path, body)

    def submit(self, flow: str, **parameters: object) -> dict[str, Any]:
        """Run a deployment to its end."""
        deployed = self.api(f"deployments/name/{flow}/{flow}")
        found = self.api(f"deployments/{deployed['id']}/create_flow_run", {"parameters": parameters})
        return self.ended(found["id"])

    def ended(self, flow_run: str) -> dict[str, Any]:
        deadline = time.monotonic() + FLOW_S
        while (found := self.api(f"flow_runs/{flow_run}"))["state"]["type"] not in ("COMPLETED", "FAILED", "CRASHED"):
            if time.monotonic() > deadline:
                raise TimeoutError(f"flow run {found['name']} is {found['state']['name']} after {FLOW_S:g} s")
            time.sleep(1)
        return found

    def config(self, traffic: str, *overrides: str) -> dict[str, Any]:
        settings = [*RECIPE, f"data.source={self.prompts[traffic]}", *overrides]
        return load_recipe(ROOT / "recipes/tiny.yaml", settings).model_dump(mode="json")

    def champion(self) -> RegisteredDraft:
        from infra.tracking.registry import champion

        found = champion(os.environ["MLFLOW_TRACKING_URI"], DRAFT)
        assert found, "no champion"
        return found

    def rows(self, traffic: str) -> list[tuple[int, int]]:
        """What the champion accepts of this traffic; the engine is restarted with it."""
        from infra.tracking.registry import download

        draft = self.champion()
        export = self.folder / "served" / str(draft.version)
        if not export.exists():
            download(os.environ["MLFLOW_TRACKING_URI"], draft, export)
        self.served.load(export)
        target = json.loads(next((self.folder / "runs").glob("*/target.json")).read_text())["path"]
        out = export.with_name(f"{draft.version}-{traffic}.json")
        return list(count(Path(target), export, self.prompts[traffic], out))

    def live(self, traffic: str, what: str, quality: tuple[float, ...] = (1.0,)) -> Day:
        """One day of traffic; `quality` is that of its looks, repeated."""
        counted = Counters()
        number = len(self.days)
        texts = random.Random(f"{self.seed} {number}").sample(
            self.prompts[traffic].read_text().splitlines(), REQUESTS_A_DAY
        )
        lines = [json.dumps({"prompt": json.loads(text)["text"]}) for text in texts]
        write_atomically(self.logs / f"day-{number:02}.jsonl", "\n".join(lines))
        for old in sorted(self.logs.glob("day-*.jsonl"))[:-2]:
            old.unlink()  # as rotated logs are
        day = Day(number, traffic, what, self.champion().version)
        for look in range(LOOKS_A_DAY):
            rows, before = self.rows(traffic), self.served.counted
            self.served.serve(rows, WINDOW_STEPS, quality[look % len(quality)])
            counted = counted.plus(self.served.counted.since(before))
            said = self.submit("watch-traffic")
            if said["state"]["type"] != "COMPLETED":
                raise RuntimeError(f"watch-traffic: {said['state']['message']}")
            self.follow(day)
        day.acceptance_length = round(counted.tokens / counted.steps, 3)
        self.days.append(day)
        headline = f"day {number}: {traffic}, {what}: {day.acceptance_length}, version {day.champion}"
        print(headline, *day.happened, sep="\n  ", flush=True)
        return day

    def follow(self, day: Day) -> None:
        """Wait for what an alarm has started, and note what came of it."""
        for event, flow in (("draftsmith.draft.drifted", "retrain"), ("draftsmith.draft.degraded", "rollback")):
            wanted = len(self.api("events/filter", {"filter": {"event": {"name": [event]}}})["events"])
            deadline = time.monotonic() + EVENT_S
            while len(self.started_by_events(flow)) < wanted and time.monotonic() < deadline:
                time.sleep(1)
            for run in self.started_by_events(flow):
                if run not in self.followed:
                    self.followed.append(run)
                    state = self.ended(run)["state"]
                    day.happened.append(f"{flow}: {state['type']}, version {self.champion().version} serves now")

    def started_by_events(self, flow: str) -> list[str]:
        """Ids of the flow's runs that an automation has started."""
        runs = self.api("flow_runs/filter", {"flows": {"name": {"any_": [flow]}}})
        return [run["id"] for run in runs if (run["created_by"] or {}).get("type") == "AUTOMATION"]


def write_traffic(folder: Path, seed: int) -> dict[str, Path]:
    """Prompts of every kind, from Python's own documentation, no text in two kinds."""
    texts = [" ".join(text.split()) for _, text in python_docs.documents()]
    random.Random(seed).shuffle(texts)
    prompts = {}
    for index, (kind, write) in enumerate(TRAFFIC.items()):
        pieces = [text[at : at + 160] for text in texts[index :: len(TRAFFIC)] for at in range(0, len(text) - 160, 480)]
        random.Random(seed).shuffle(pieces)
        prompts[kind] = folder / f"{kind}.jsonl"
        lines = (json.dumps({"text": write(piece)}) + "\n" for piece in pieces[:REQUESTS_A_DAY])
        write_atomically(prompts[kind], "".join(lines))
    return prompts


def write_deployments(folder: Path, config: dict[str, Any], served: Engine) -> None:
    """prefect.yaml as it is, for the tiny target and this engine."""
    tree = yaml.safe_load((ROOT / "prefect.yaml").read_text())
    for deployment in tree["deployments"]:
        parameters = deployment.setdefault("parameters", {})
        match deployment["name"]:
            case "retrain":
                parameters["config"] = config
                (trigger,) = deployment["triggers"]
                trigger["match"] = {"prefect.resource.id": DRAFT}
                source = {"__prefect_kind": "jinja", "template": "{{ event.payload.dataset }}"}
                trigger["parameters"]["config"] = config | {
                    "data": config["data"] | {"source": source},
                    "training": config["training"] | {"start_from": "champion", "max_steps": DRIFT_STEPS},
                }
            case "watch-traffic":
                logs = {"folder": str(folder / "requests"), "prompts": REQUESTS_A_DAY}
                parameters["config"] = {
                    "draft": DRAFT, "servers": [served.url], "window_steps": WINDOW_STEPS, "requests": logs,
                }  # fmt: skip
            case "promote" | "rollback" | "benchmark-champion":
                parameters["draft"] = DRAFT
    write_atomically(folder / "prefect.yaml", yaml.safe_dump(tree, sort_keys=False))


def break_export(soak: Soak) -> str:
    """Register the champion again with damaged weights, and have it promoted; how that ended."""
    from infra.tracking import registry, runs
    from infra.tracking.client import connect

    uri, champion = os.environ["MLFLOW_TRACKING_URI"], soak.champion()
    made_by = connect(uri).get_run(str(connect(uri).get_model_version(DRAFT, str(champion.version)).run_id))
    run = runs.TrackedRun(uri=uri, experiment_id=made_by.info.experiment_id, run_id=made_by.info.run_id)
    export = registry.download(uri, champion, soak.folder / "broken")
    weights = bytearray((export / "model.safetensors").read_bytes())
    weights[len(weights) // 2] ^= 0xFF
    (export / "model.safetensors").write_bytes(weights)
    tags = {name: champion.tags[name] for name in (registry.ACCEPTANCE, registry.RUN, "target_revision")}
    model = runs.log_folder(run, export, "draft", 1, "draft")
    broken = registry.register(uri, DRAFT, model, run.run_id, tags)
    ended = soak.submit("promote", draft=DRAFT, version=broken.version, ask=False, reason="a damaged export")
    return (
        f"version {broken.version}, damaged: promote {ended['state']['type']}, version {soak.champion().version} serves"
    )


def fortnight(soak: Soak) -> None:
    """What happens, and when."""
    assert soak.submit("retrain", config=soak.config("plain"))["state"]["type"] == "COMPLETED"
    soak.live("plain", "the first draft serves")
    soak.live("plain", "quiet")
    soak.live("plain", "a bad morning: two looks at 88 %", (1.0, 0.88, 0.88, 1.0, 1.0, 1.0))
    soak.live("plain", "quiet")
    soak.live("shouted", "drift")
    soak.live("shouted", "after the drift")
    soak.live("shouted", "quiet")
    worse = soak.submit("retrain", config=soak.config("shouted", "training.max_steps=2"))
    soak.live("shouted", f"a draft that was hardly trained: retrain {worse['state']['type']}")
    soak.live("shouted", break_export(soak))
    soak.live("leet", "drift")
    soak.live("leet", "after the drift")
    before = soak.champion().version
    longer = soak.config("leet", "training.max_steps=300", "training.start_from=champion")
    ended = soak.submit("retrain", config=longer)["state"]["type"]
    what = f"a longer training: {ended}, version {soak.champion().version} after {before}, served at 70 %"
    quality = 0.7 if soak.champion().version != before else 1.0
    while soak.champion().version != before and len(soak.days) < 13:
        soak.live("leet", what, (quality,))
    while len(soak.days) < 14:
        soak.live("leet", "quiet")
    soak.submit("clean-up", keep_runs=KEEP_RUNS)


def faults(soak: Soak) -> list[str]:
    """What is not as it should be."""
    from infra.tracking.registry import history

    found = []
    happened = [line for day in soak.days for line in day.happened]
    for flow, times in (("retrain", 2), ("rollback", 1)):
        seen = sum(line.startswith(f"{flow}: COMPLETED") for line in happened)
        if seen != times:
            found.append(f"{seen} times {flow} by event, {times} expected")
    found += [line for line in happened if "COMPLETED" not in line]
    decided = [(one.version, one.outcome, one.by) for one in history(os.environ["MLFLOW_TRACKING_URI"], DRAFT)]
    expected = [
        (1, "promoted", "gate"),
        (2, "promoted", "gate"),
        (3, "refused", "gate"),
        (4, "promoted", "whoever started the flow"),
        (4, "rolled back", "smoke test"),
        (5, "promoted", "gate"),
        (6, "promoted", "gate"),
        (6, "rolled back", "served traffic"),
    ]
    if decided != expected:
        found.append(f"decisions {decided}, {expected} expected")
    if (kept := len(list((soak.folder / "runs").glob("*/config.json")))) > 3 * KEEP_RUNS:
        found.append(f"{kept} run folders are left")
    return found


def left_behind(folder: Path, memory: Path) -> list[str]:
    """Processes that write below the folder, and shared memory."""
    found = [f"shared memory {path.name}" for path in memory.glob("draftsmith-*")]
    for process in psutil.process_iter():
        try:
            if os.readlink(f"/proc/{process.pid}/fd/1").startswith(f"{folder}/"):
                found.append(f"process {' '.join(process.cmdline())[:100]}")
        except (OSError, psutil.Error):
            continue
    return found


def environment_of(folder: Path) -> dict[str, str]:
    """What `source runs/.stack/environment` sets."""
    script = f"set -a; . {folder}/runs/.stack/environment; env -0"
    printed = subprocess.run(["bash", "-c", script], check=True, stdout=subprocess.PIPE, text=True).stdout
    return dict(line.split("=", 1) for line in printed.split("\0") if "=" in line)


def draftsmith(folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-c", "from flows.command_line import main; main()", *arguments]
    subprocess.run(command, cwd=folder, check=True, timeout=900)


def soak_in(folder: Path, seed: int) -> dict[str, Any]:
    """The fortnight in an empty folder, and its figures."""
    memory = folder / "shm"
    memory.mkdir()
    os.environ |= {"DRAFTSMITH_RUNS": str(folder / "runs"), "DRAFTSMITH_SHM": str(memory)}
    os.environ |= {"PREFECT_HOME": str(folder / "prefect"), "PWD": str(folder)}
    begun = time.monotonic()
    with engine(seed) as served:
        soak = Soak(folder, served, seed)
        write_deployments(folder, soak.config("plain"), served)
        draftsmith(folder, "up", "--background")
        try:
            os.environ |= environment_of(folder)
            fortnight(soak)
            found = faults(soak)
        finally:
            draftsmith(folder, "down")
    disk = sum(
        path.stat().st_size for path in (folder / "runs").rglob("*") if path.is_file() and ".stack" not in path.parts
    )
    return {
        "faults": [*found, *left_behind(folder, memory)],
        "days": [asdict(day) for day in soak.days],
        "looks_a_day": LOOKS_A_DAY,
        "window_steps": WINDOW_STEPS,
        "lookahead": LOOKAHEAD,
        "run_folders_mib": round(disk / 2**20, 1),
        "wall_s": round(time.monotonic() - begun),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=RESULT)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="draftsmith-soak-"))
    folder.chmod(0o755)  # PostgreSQL runs as another user where this one is root
    result = soak_in(folder, options.seed)
    conditions = {
        "commit": git_sha(), "seed": options.seed, "date": time.strftime("%Y-%m-%d"), "hardware": hardware(),
        "versions": versions(),
    }  # fmt: skip
    write_atomically(options.json, json.dumps({**result, **conditions}, indent=2) + "\n")
    print("faults:", *(result["faults"] or ["none"]), sep="\n  ")
    if result["faults"]:
        raise SystemExit(f"logs and runs are in {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    run_main(main)
