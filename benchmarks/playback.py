"""In place of the interpreter that starts a run's data plane: records what its modules write, or plays that back.

`playback.py -m MODULE RUN ...`, with $PLAYBACK a folder. Without `$PLAYBACK/recorded` the module runs, and the files of
the run folder that it has made or changed are kept. With it, it takes as long as it did, and these files are copied.
Two are played otherwise: a generator waits to be stopped, and a trainer writes a line of its metrics every few seconds
until there is `$PLAYBACK/go`. Only the standard library, because it is started often.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

FLOWS_OWN = ("config.json", "flow_run", "tracking.json", "devices.jsonl", "generators.jsonl", "recoveries.json")
"""What the flow itself writes."""
LINE_S, POLL_S = 5.0, 0.2
GENERATOR, TRAINER = "models.capture.generator", "models.training.launch"


def snapshot(run: Path) -> dict[str, float]:
    """Files that the data plane may have written, with the times of their last change."""
    found = {}
    for path in run.rglob("*"):
        name = str(path.relative_to(run))
        if path.is_file() and name not in FLOWS_OWN and not name.startswith(("logs/", "ledger.", "meetings/")):
            found[name] = path.stat().st_mtime
    return {name: time for name, time in found.items() if not name.endswith(".lock")}


def record(module: str, run: Path, place: Path, command: list[str]) -> int:
    """Run it."""
    before, begun = snapshot(run), time.monotonic()
    process = subprocess.Popen(command)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    status = process.wait()
    written = [name for name, changed in snapshot(run).items() if before.get(name) != changed]
    for name in written:
        (place / module / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(run / name, place / module / name)
    (place / f"{module}.json").write_text(json.dumps({"seconds": time.monotonic() - begun, "files": written}))
    return status


def play(module: str, run: Path, place: Path) -> int:
    """Behave as recorded."""
    if module == GENERATOR:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        while True:
            time.sleep(3600)
    known = json.loads((place / f"{module}.json").read_text())
    if module == TRAINER:
        train(run, place)
    else:
        time.sleep(known["seconds"])
    for name in known["files"]:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(place / module / name, run / name)
    return 0


def train(run: Path, place: Path) -> None:
    """Be on the way until everybody is."""
    lines = (place / TRAINER / "metrics.jsonl").read_text().splitlines()
    (place / "training").mkdir(exist_ok=True)
    (place / "training" / run.name).touch()
    written = 0.0
    while not (place / "go").exists():
        if lines and time.monotonic() - written > LINE_S:
            with (run / "metrics.jsonl").open("a") as file:
                file.write(lines.pop(0) + "\n")
            written = time.monotonic()
        time.sleep(POLL_S)


def main() -> None:
    module, run, place = sys.argv[2], Path(sys.argv[3]), Path(os.environ["PLAYBACK"])
    if (place / "recorded").exists():
        status = play(module, run, place)
    else:
        status = record(module, run, place, [sys.executable, *sys.argv[1:]])
    sys.exit(status)


if __name__ == "__main__":
    main()
