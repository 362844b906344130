"""How busy a run's GPUs were, by role, as NVML counts it: the share of time in which a kernel ran.

Every process that has leased GPUs looks at them while it runs, and writes a line a minute into a file of its own, on
whichever machine it is. The share says nothing of how well a kernel uses the GPU; a GPU that is leased while no process
of the run is on it is not looked at. The driver counts for a whole GPU, not for a MIG slice or a process.
"""

import os
import platform
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from pynvml import NVMLError

from infra.files.lines import as_line, read_objects
from infra.files.run_folder import RunFolder
from infra.pools.base import Role
from infra.pools.gpus import busy_shares
from infra.settings import leased_gpus

LOOK_S = 5.0
LINE_S = 60.0
STOP_S = 10.0
"""A driver that has lost a GPU may never answer, and must not keep the process from ending."""


@contextmanager
def measured_use(folder: RunFolder, role: Role, look_s: float = LOOK_S, line_s: float = LINE_S) -> Iterator[None]:
    """Write down how busy this process's leased GPUs are until the block ends."""
    gpus = leased_gpus()
    if not gpus:
        yield
        return
    folder.gpu_use.mkdir(exist_ok=True)
    meter = _Meter(folder.gpu_use / f"{role}-{platform.node()}-{os.getpid()}.jsonl", role, gpus)
    thread = threading.Thread(target=meter.run, args=(look_s, line_s), name="GPU meter", daemon=True)
    thread.start()
    try:
        yield
    finally:
        meter.stop.set()
        thread.join(STOP_S)


class _Meter:
    def __init__(self, path: Path, role: Role, gpus: Sequence[str]) -> None:
        self._path, self._role, self._gpus = path, role, gpus
        self.stop = threading.Event()

    def run(self, look_s: float, line_s: float) -> None:
        """Look every `look_s` seconds, and write the mean every `line_s`. A driver that cannot say ends it."""
        begun, shares = time.monotonic(), list[float]()
        while not self.stop.wait(look_s):
            try:
                shares += busy_shares(self._gpus)
            except NVMLError as error:
                print(f"how busy the GPUs are is not measured any more: NVML says {error}", flush=True)
                break
            if time.monotonic() - begun >= line_s:
                self._write(shares, begun)
                begun, shares = time.monotonic(), []
        self._write(shares, begun)

    def _write(self, shares: Sequence[float], begun: float) -> None:
        if not shares:  # none of the process's GPUs answered
            return
        gpu_s, busy = len(self._gpus) * (time.monotonic() - begun), sum(shares) / len(shares)
        with self._path.open("a") as file:
            file.write(as_line({"role": self._role, "gpu_s": gpu_s, "busy": busy}))


def gpu_use(folder: RunFolder) -> Mapping[str, float]:
    """The share of time in which a kernel ran on the GPUs of each role; without roles that were not measured."""
    looked_s, busy_s = defaultdict[str, float](float), defaultdict[str, float](float)
    for path in folder.gpu_use.glob("*.jsonl"):
        for line in read_objects(path):
            looked_s[line["role"]] += line["gpu_s"]
            busy_s[line["role"]] += line["gpu_s"] * line["busy"]
    return {role: busy_s[role] / total for role, total in looked_s.items() if total}
