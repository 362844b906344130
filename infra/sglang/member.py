"""`python -m infra.sglang.member RUN INDEX MACHINES`: a further machine of the servers that another process starts.

It starts what the first machine's process orders, stops it when the order is gone, and fails where its server does:
then the flow starts all of them again. MACHINES is the JSON of a ServerMachines.
"""

import signal
import sys
import time
from pathlib import Path
from types import FrameType

from infra.data_plane.meeting import MetMachine, meet
from infra.files.run_folder import RunFolder
from infra.processes.exit import run_main
from infra.processes.process import Owner, ProcessFailedError
from infra.records.servers import ServerMachines, ServerOrder
from infra.run.gpu_use import measured_use
from infra.settings import server_part_environment
from infra.sglang.command import sglang_python
from infra.sglang.machines import newest_order, part_of
from infra.sglang.server import SGLangServer

POLL_S = 0.5
REVOKED_S = 10.0
"""A server that is stopped ends its ranks on every machine, perhaps before the order is seen to be gone."""


def follow(folder: RunFolder, machine: MetMachine, meeting: Path) -> None:
    """Start and stop servers as ordered. Raises as SGLangServer does, and ProcessFailedError where one ends."""
    while True:
        order = newest_order(meeting)
        if order is not None:
            _serve(folder, machine, meeting, order)
        time.sleep(POLL_S)


def _serve(folder: RunFolder, machine: MetMachine, meeting: Path, order: ServerOrder) -> None:
    def command(port: int) -> list[str]:
        own = list(order.command)
        own[0], own[own.index("--port") + 1] = str(sglang_python()), str(port)
        return [*own, *part_of(order, machine.index, machine.machines)]

    environment = order.environment | server_part_environment(machine.interface, machine.address)
    role, owner = f"{order.role}-machine-{machine.index}", Owner(folder.name, folder.logs)
    try:
        server = SGLangServer(command, role, owner, environment, order.start_timeout_s)
        try:
            while newest_order(meeting) == order:
                server.check()
                time.sleep(POLL_S)
        finally:
            server.stop()
    except ProcessFailedError:
        deadline = time.monotonic() + REVOKED_S
        while newest_order(meeting) == order:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_S)


def _end(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


def main() -> None:
    run, index, described = sys.argv[1:]
    machines, folder = ServerMachines.model_validate_json(described), RunFolder(Path(run))
    signal.signal(signal.SIGTERM, _end)  # so that it stops its server on the way out
    machine = meet(machines.meeting, machines.address, int(index), machines.count)
    print(f"machine {index} of {machines.count} is ready", flush=True)
    with measured_use(folder, "inference"):
        follow(folder, machine, machines.meeting)


if __name__ == "__main__":
    run_main(main)
