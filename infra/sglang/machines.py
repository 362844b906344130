"""A server over several machines: each of them runs one, with a part of the ranks, and the first one is asked.

The process on the first machine writes an order into the folder where they have met, and the others start what it says
(`infra.sglang.member`). The ranks talk to each other in the private network: SGLang finds them by a port that it opens
on every interface of the first machine, and sends them pickled objects.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import count
from pathlib import Path

from infra.data_plane.meeting import meet
from infra.files.atomic import write_atomically
from infra.network.ports import reserved_port
from infra.records.servers import ServerMachines, ServerOrder
from infra.settings import server_part_environment

ORDERS = "order-*.json"
_serials = count()


class LedMachines:
    """The other machines of a server, from its first one. Its creator closes it.

    Raises as `meet` does.
    """

    def __init__(self, machines: ServerMachines, role: str, start_timeout_s: float):
        met = meet(machines.meeting, machines.address, 0, machines.count)
        self._machines, self._role, self._start_timeout_s = machines, role, start_timeout_s
        self._serial, self._stack = next(_serials), ExitStack()
        self._order = machines.meeting / ORDERS.replace("*", str(self._serial))
        port, lock = self._stack.enter_context(reserved_port(met.address))
        self.descriptor = lock.descriptor
        self.environment = server_part_environment(met.interface, met.address)
        self._ranks_at = f"{met.address}:{port}"

    def start(self, command: Sequence[str], environment: dict[str, str]) -> list[str]:
        """Have the others start. Returns the first one's own command."""
        order = ServerOrder(
            serial=self._serial,
            role=self._role,
            command=tuple(command),
            environment=environment,
            start_timeout_s=self._start_timeout_s,
            ranks_at=self._ranks_at,
        )
        write_atomically(self._order, order)
        return [*command, *part_of(order, 0, self._machines.count)]

    def stop(self) -> None:
        """Have the others stop. Idempotent."""
        self._order.unlink(missing_ok=True)

    def close(self) -> None:
        """Have the others stop, and give the port back. Idempotent."""
        self.stop()
        self._stack.close()


def part_of(order: ServerOrder, index: int, machines: int) -> list[str]:
    """Arguments of the server's part on machine `index`."""
    return ["--nnodes", str(machines), "--node-rank", str(index), "--dist-init-addr", order.ranks_at]


def newest_order(meeting: Path) -> ServerOrder | None:
    """What is to run now; None: nothing."""
    files = sorted(meeting.glob(ORDERS), key=lambda file: int(file.stem.rpartition("-")[2]))
    try:
        return ServerOrder.read(files[-1]) if files else None
    except FileNotFoundError:  # revoked just now
        return None
