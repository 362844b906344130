"""Where machines meet that share a trainer's ranks, or a server's: a folder in the run folder, which all of them see.

A trainer's ranks find each other through a file in it. A port would need a secret; who may write to the run folder is
trusted anyway. Gloo and NCCL then listen on the private network alone.
"""

import secrets
import shutil
import socket
import time
from pathlib import Path
from typing import NamedTuple

from infra.files.atomic import write_atomically
from infra.files.run_folder import RunFolder
from infra.network.ports import HOST, interface_of, own_address
from infra.refusal import Refusal
from infra.settings import LOOPBACK

MEET_S = 600.0
"""Timeout for the other machines: a cluster may start their commands late."""
POLL_S = 0.1


class MetMachine(NamedTuple):
    """One of the machines that have met."""

    index: int = 0
    machines: int = 1
    store: str = ""
    """The file through which a trainer's ranks find each other."""
    interface: str = LOOPBACK
    """The network interface on which ranks listen."""
    address: str = HOST
    """Its address there."""


ALONE = MetMachine()


def open_meeting(run: RunFolder, role: str) -> Path:
    """A new folder for the machines of a command to meet in; those of its earlier starts are removed."""
    shutil.rmtree(run.meetings / role, ignore_errors=True)
    folder = run.meetings / role / secrets.token_hex(8)
    folder.mkdir(parents=True)
    return folder


def meet(folder: Path, address: str, index: int, machines: int, wait_s: float = MEET_S) -> MetMachine:
    """Wait for the other machines.

    Args:
        folder: of this meeting, on a file system that all machines share.
        address: of the flow's machine in the machines' private network.
        index: this machine's number.
        machines: how many there are.
        wait_s: how long the others may take.

    Raises Refusal where this machine does not see the folder or does not reach the address, and where several machines
    would meet on loopback; TimeoutError where others do not come.
    """
    host = socket.gethostname()
    if not folder.is_dir():
        raise Refusal(
            f"{host} does not see {folder}: where several machines work together, the run folder must be on a file "
            "system that all of them share: set DRAFTSMITH_RUNS to one"
        )
    try:
        own = own_address(f"{address}:1")
        interface = interface_of(own)
    except OSError as error:
        raise Refusal(
            f"{host} does not reach transport.address={address} ({error}): set it to the address of the flow's machine "
            "in the private network of all machines"
        ) from error
    write_atomically(folder / str(index), host)
    places = [folder / str(number) for number in range(machines)]
    deadline = time.monotonic() + wait_s
    while missing := [place.name for place in places if not place.is_file()]:
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{host} waited {wait_s:g} s in {folder} for the machines {', '.join(missing)}: is that on a file "
                "system that all of them share?"
            )
        time.sleep(POLL_S)
    hosts = sorted({place.read_text() for place in places})
    if interface == LOOPBACK and len(hosts) > 1:
        raise Refusal(
            f"the machines {', '.join(hosts)} cannot meet on loopback: set transport.address to the address of the "
            "flow's machine in their private network"
        )
    return MetMachine(index, machines, str(folder.absolute() / "store"), interface, own)
