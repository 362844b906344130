"""Commands that start SGLang servers, on one machine or on several."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from infra.data_plane.meeting import open_meeting
from infra.files.run_folder import RunFolder
from infra.network.ports import HOST
from infra.pools.base import Pool
from infra.processes.gang import Gang
from infra.processes.process import Process, module
from infra.records.servers import ServerMachines
from infra.settings import SERVER_MACHINES


@dataclass(frozen=True)
class ServerSpan:
    """Over how many machines each SGLang server of a run extends."""

    machines: int = 1
    address: str = HOST
    """Of the flow's machine, in their private network."""


HERE = ServerSpan()


def launch_serving(
    pool: Pool,
    folder: RunFolder,
    role: str,
    command: Sequence[str],
    span: ServerSpan,
    *,
    threads: int | None = None,
    processes: int = 1,
    index: int | None = None,
) -> Process | Gang:
    """Start a command that starts SGLang servers, and on each further machine what starts their other parts.

    `processes`, `index`: as a pool's `launch` takes them, each on `span.machines` parts of the pool.
    """
    if span.machines == 1:
        return pool.launch(role, command, threads=threads, processes=processes, index=index)
    meeting = open_meeting(folder, role).absolute()
    met = ServerMachines(meeting=meeting, count=span.machines, address=span.address).model_dump_json()
    first, parts = span.machines * (index or 0), span.machines * processes
    roles = [role, *(f"{role}-machine-{number}" for number in range(1, span.machines))]
    commands = [["env", f"{SERVER_MACHINES}={met}", *command]]
    for number in range(1, span.machines):
        commands.append(module("infra.sglang.member", folder.path, str(number), met))
    with ExitStack() as stack:
        members = []
        for number, (name, line) in enumerate(zip(roles, commands, strict=True)):
            members.append(pool.launch(name, line, threads=threads, processes=parts, index=first + number))
            stack.callback(members[-1].stop)
        stack.pop_all()
    return Gang(members, led=True)
