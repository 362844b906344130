"""Ports and addresses of this machine, for the servers we start."""

import random
import socket
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any

import psutil

from infra.files.locks import Lock, LockHeldError, hold
from infra.refusal import Refusal

HOST = "127.0.0.1"
ELSEWHERE = "192.0.2.1:9"
"""An address that nobody has (RFC 5737): the route to it is the default one."""
LASTING = range(21000, 29000)
"""Below those that the kernel gives to outgoing connections."""
PORTS_TRIED = 100


def is_free(port: int, host: str = HOST) -> bool:
    """Whether a port of this machine is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError):
            return False
    return True


def free_port(option: str, wanted: int | None, usual: int, taken: set[int]) -> tuple[int, str]:
    """The wanted port, or the first free one from the usual one on, and a note where it is not that one.

    Raises Refusal when there is none.
    """
    for port in range(usual, usual + PORTS_TRIED) if wanted is None else [wanted]:
        if port not in taken and is_free(port):
            taken.add(port)
            moved = wanted is None and port != usual
            return port, f"is not at port {usual}: another program holds it" if moved else ""
    if wanted is not None:
        raise Refusal(f"{option} {wanted} is taken by another program: leave the option out, or name a free port")
    raise Refusal(f"the ports from {usual} to {usual + PORTS_TRIED - 1} are all taken: name a free one by {option}")


def lasting_ports(count: int) -> list[int]:
    """Free ports for a server that is to be found at the same ones again after a restart."""
    free = (port for port in random.sample(LASTING, len(LASTING)) if is_free(port))
    found = list(islice(free, count))
    if len(found) < count:
        raise Refusal(f"{count} ports of {LASTING.start}..{LASTING.stop - 1} are wanted, {len(found)} are free")
    return found


def own_address(peer: str) -> str:
    """This machine's address in the network of `peer` (host:port). Sends nothing."""
    host, _, port = peer.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])


def machine_address(setting: str) -> str:
    """An address of this machine: the one that is set, or, for `auto`, the one by which it reaches other networks.

    Raises Refusal where no route leads anywhere.
    """
    if setting != "auto":
        return setting
    try:
        return own_address(ELSEWHERE)
    except OSError as error:
        raise Refusal(
            f"transport.address=auto: no route leads out of this machine ({error}); set the address by which the "
            "others reach it"
        ) from error


def listening_address(setting: str) -> str:
    """`machine_address` for a server of this machine. Raises Refusal also where no server of it can listen there."""
    address = machine_address(setting)
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
            number = probe.getsockname()[0]
        except OSError as error:
            raise Refusal(
                f"transport.address={address} is no IPv4 address of this machine, on which the flow runs ({error}): "
                "correct it, or set transport.address=auto"
            ) from error
    if number.startswith("127.") and address not in (number, "localhost"):  # as Debian's /etc/hosts has it
        raise Refusal(
            f"transport.address={address} is {number} on this machine, where no other machine reaches it: write the "
            "address as a number, or set transport.address=auto"
        )
    return address


def interface_of(address: str) -> str:
    """Name of the network interface with an address of this machine."""
    return next(name for name, found in psutil.net_if_addrs().items() if any(one.address == address for one in found))


def is_foreign(port: int, processes: Callable[[], Iterable[int]]) -> bool:
    """Whether somebody listens at a port of this machine, and none of `processes`.

    They are asked for once somebody listens: of a list made before, a child that started meanwhile would be missing.
    """

    def listens(connections: Iterable[Any]) -> bool:
        return any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in connections)

    if not listens(psutil.net_connections("tcp")):
        return False
    for process in processes():
        with suppress(psutil.Error):  # it has ended
            if listens(psutil.Process(process).net_connections("tcp")):
                return False
    return True


@contextmanager
def reserved_port(host: str = HOST) -> Iterator[tuple[int, Lock]]:
    """A free port with a lock that keeps our other servers off it, for a server that binds after minutes of loading."""
    folder = Path(tempfile.gettempdir()) / "draftsmith-ports"
    for port in random.sample(LASTING, len(LASTING)):
        try:
            with hold(folder / str(port), for_everybody=True) as lock:
                if is_free(port, host):
                    yield port, lock
                    return
        except LockHeldError:
            continue
    raise Refusal(f"no free port in {LASTING.start}..{LASTING.stop - 1} of this machine: stop what listens there")
